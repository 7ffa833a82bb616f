"""Weights with their description: what one evaluates, shares and loads.

A file holds the weights and, as JSON metadata, everything needed to build the model and feed it.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from vision_ttt._version import __version__
from vision_ttt.engine.building import build_model, load_weights
from vision_ttt.engine.config import ConfigError
from vision_ttt.engine.tensor_files import CheckpointError, read_tensors, write_tensors
from vision_ttt.models.arguments import architecture

WEIGHTS_FILE = "last.safetensors"
BEST_FILE = "best.safetensors"
_LARGEST_SIDE = 16_384  # pixels; beyond it metadata is damaged rather than ambitious
_FORMAT = 1
_KINDS = {
    "classifier": "a classifier (for vision-ttt eval, predict and export)",
    "diffusion": "a diffusion model (for vision-ttt sample)",
}


@dataclass(frozen=True)
class ModelMetadata:
    """What a weights file says about itself."""

    model: str
    """Name in timm's registry."""
    model_args: dict[str, Any]
    """Constructor arguments: num_classes, in_chans, img_size where the model takes it, …; those
    of :data:`vision_ttt.models.arguments.FUSED` are left out, as they say how it was trained."""
    classes: tuple[str, ...]
    """Class names, by index."""
    input: dict[str, Any]
    """timm's data config: input_size, mean, std, interpolation, crop_pct, crop_mode."""
    dataset: dict[str, Any] = field(default_factory=dict)
    """The `DatasetSpec` it was trained on."""
    epoch: int = 0
    """Whole epochs trained."""
    update: int = 0
    """Optimiser updates made."""
    averaged: bool = False
    """Whether the weights are an exponential moving average."""
    test_accuracy: float | None = None
    """At the end of the last whole epoch, from 0 to 1; None for what does not classify."""
    diffusion: dict[str, Any] | None = None
    """Of a diffusion model the arguments of `vision_ttt.diffusion.make_process`; else None."""
    vision_ttt: str = __version__
    """Version that wrote the file."""
    format: int = _FORMAT
    """Version of this list of fields."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not isinstance(self.model_args, dict):
            raise TypeError("model must be a name and model_args a mapping")
        object.__setattr__(self, "model_args", architecture(self.model_args))


def save_weights(
    path: Path, weights: Mapping[str, Tensor], metadata: ModelMetadata, *, writes: bool = True
) -> None:
    """Write weights and metadata atomically as safetensors, with their SHA-256.

    Args:
        weights: by name; sharded ones are gathered one at a time, by all processes that share them.
        writes: whether this process writes the file, or only takes part in gathering.

    Raises:
        OSError: the disk is full or the folder cannot be written; the former file is kept.
    """
    write_tensors(path, weights, json.dumps(asdict(metadata)), writes=writes)


def load_model(
    path: str | Path, *, kind: Literal["classifier", "diffusion"] | None = "classifier"
) -> tuple[nn.Module, ModelMetadata]:
    """Build the model that a weights file describes and load it strictly, to evaluate on the CPU.

    Args:
        path: of the file.
        kind: what the model has to be; None for either.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is truncated, damaged, a pickle (which is not opened), not one of
            ours, its weights are not those of the model it names, or the model is of another kind.
    """
    path = Path(path)
    weights, text = read_tensors(path)
    if text is None:
        raise CheckpointError(
            f"{path} has no vision-ttt metadata: it does not say which model it is"
        )
    metadata = _parse_metadata(text, path)
    own = "classifier" if metadata.diffusion is None else "diffusion"
    if kind not in (None, own):
        raise CheckpointError(f"{path} holds {_KINDS[own]}, not {_KINDS[kind]}")
    try:
        model = build_model(metadata.model, metadata.model_args)
        load_weights(model, weights, "its content")
    except ConfigError as error:
        raise CheckpointError(f"checkpoint {path}: {error}") from error
    return model.eval(), metadata


def _parse_metadata(text: str, path: Path) -> ModelMetadata:
    try:
        values = json.loads(text)
        if values["format"] != _FORMAT:
            raise CheckpointError(f"{path} has format {values['format']}; {_FORMAT} is read")
        metadata = ModelMetadata(**{**values, "classes": tuple(values["classes"])})
        if not isinstance(metadata.diffusion, dict | None):
            raise TypeError("diffusion must be a mapping or null")
        if metadata.model_args["num_classes"] != len(metadata.classes):
            raise ValueError("the number of classes does not fit")
        _check_input(metadata.input)
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} has damaged vision-ttt metadata: {error}") from error
    return metadata


def _check_input(values: dict[str, Any]) -> None:
    """Raise ValueError, TypeError or KeyError unless these describe an image input."""
    size = values["input_size"]
    if len(size) != 3 or not all(isinstance(n, int) and 1 <= n <= _LARGEST_SIDE for n in size):
        raise ValueError(f"input_size {size} is not three numbers from 1 to {_LARGEST_SIDE}")
    for name in ("mean", "std"):
        if not all(math.isfinite(float(number)) for number in values[name]):
            raise ValueError(f"{name} {values[name]} is not finite")
    if not isinstance(values["interpolation"], str):
        raise TypeError("interpolation is not a name")
    if not 0 < float(values["crop_pct"]) <= 1:
        raise ValueError(f"crop_pct {values['crop_pct']} is not in (0, 1]")
