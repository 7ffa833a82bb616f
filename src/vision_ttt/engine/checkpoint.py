"""Checkpoints: weights with their description (safetensors), and a run's state to resume from.

`last.safetensors` is what one evaluates, shares and loads: weights, and as JSON metadata everything
needed to build the model and feed it. `last.state.pt` is what one resumes from: one file, so that
its parts always belong together. Neither is ever unpickled.
"""

import io
import json
import math
import pickle
import zipfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from vision_ttt._version import __version__
from vision_ttt.engine.building import build_model, load_weights
from vision_ttt.engine.config import ConfigError
from vision_ttt.engine.files import write_bytes
from vision_ttt.errors import UserError

WEIGHTS_FILE = "last.safetensors"
STATE_FILE = "last.state.pt"
_METADATA_KEY = "vision_ttt"
_LARGEST_SIDE = 16_384  # pixels; beyond it metadata is damaged rather than ambitious
_FORMAT = 1


class CheckpointError(UserError, ValueError):
    """A checkpoint that cannot be used; names the file and what is wrong with it."""


@dataclass(frozen=True)
class ModelMetadata:
    """What a weights file says about itself."""

    model: str
    """Name in timm's registry."""
    model_args: dict[str, Any]
    """Constructor arguments: num_classes, in_chans, img_size where the model takes it, …"""
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
    """At the end of the last whole epoch, from 0 to 1."""
    vision_ttt: str = __version__
    """Version that wrote the file."""
    format: int = _FORMAT
    """Version of this list of fields."""


@dataclass
class TrainState:
    """How far a run has come, and everything it needs to go on exactly as if never interrupted.

    No generator's state is here: all randomness follows from the seed and the counters.
    """

    config: dict[str, Any] = field(default_factory=dict)
    """The run's `TrainConfig`."""
    epoch: int = 0
    """Whole epochs done."""
    position: int = 0
    """Updates done in the current epoch."""
    update: int = 0
    """Updates done altogether."""
    loss_sum: float = 0.0
    """Training loss summed over the current epoch's images."""
    images: int = 0
    """Images seen in the current epoch."""
    epoch_seconds: float = 0.0
    """Time spent training in the current epoch, in seconds."""
    seconds: float = 0.0
    """Time spent in whole epochs, in seconds."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """One row of metrics per whole epoch."""
    bad_images: list[str] = field(default_factory=list)
    """Names of the images that did not decode."""


def save_weights(path: Path, weights: dict[str, Tensor], metadata: ModelMetadata) -> None:
    """Write weights and metadata atomically as safetensors.

    Raises:
        OSError: the disk is full or the folder cannot be written; the former file is kept.
    """
    tensors = {key: value.detach().cpu().contiguous() for key, value in weights.items()}
    text = json.dumps(asdict(metadata))
    write_bytes(path, safetensors.torch.save(tensors, {_METADATA_KEY: text}))


def load_model(path: str | Path) -> tuple[nn.Module, ModelMetadata]:
    """Build the model that a weights file describes and load it strictly, to evaluate on the CPU.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is truncated, corrupt, a pickle (which is not opened), not one of
            ours, or its weights are not those of the model it names.
    """
    path = Path(path)
    weights, text = read_weights(path)
    if text is None:
        raise CheckpointError(
            f"{path} has no vision-ttt metadata: it does not say which model it is"
        )
    metadata = _parse_metadata(text, path)
    try:
        model = build_model(metadata.model, metadata.model_args)
        load_weights(model, weights, "its content")
    except ConfigError as error:
        raise CheckpointError(f"checkpoint {path}: {error}") from error
    return model.eval(), metadata


def read_weights(path: str | Path) -> tuple[dict[str, Tensor], str | None]:
    """Return a safetensors file's tensors and our metadata's JSON text, None where it has none.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it is not a whole safetensors file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(2, "No such checkpoint file", str(path))
    _refuse_pickles(path)
    try:
        with safe_open(path, framework="pt") as file:
            weights = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            return weights, (file.metadata() or {}).get(_METADATA_KEY)
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is truncated, corrupt or no safetensors file: {error}"
        ) from error


def save_state(
    path: Path,
    state: TrainState,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: nn.Module | None,
) -> None:
    """Write everything that resuming needs, atomically.

    Raises:
        OSError: the disk is full or the folder cannot be written; the former file is kept.
    """
    buffer = io.BytesIO()
    content = {
        "format": _FORMAT,
        "state": asdict(state),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "average": None if average is None else average.state_dict(),
    }
    torch.save(content, buffer)
    write_bytes(path, buffer.getvalue())


def read_state(path: str | Path) -> dict[str, Any]:
    """Return what `save_state` wrote, its "state" as a `TrainState`.

    Raises:
        FileNotFoundError: there is no such file, so nothing to resume.
        CheckpointError: truncated, corrupt, or holding more than tensors and plain values.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(2, "Nothing to resume: no such state file", str(path))
    try:
        buffer = io.BytesIO(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    try:
        content = torch.load(buffer, map_location="cpu", weights_only=True)
        if content["format"] != _FORMAT:
            raise CheckpointError(f"{path} has format {content['format']}; {_FORMAT} is read")
        content["state"] = TrainState(**content["state"])
        for key in ("model", "optimizer", "average"):
            content[key]  # a KeyError where it is missing
    except pickle.UnpicklingError as error:
        # Without torch's message, which advises to unpickle all the same.
        raise CheckpointError(f"{path} is corrupt, or holds code and was not unpickled") from error
    except (
        *(RuntimeError, EOFError, OSError, zipfile.BadZipFile),
        *(KeyError, TypeError, ValueError),
    ) as error:
        raise CheckpointError(f"{path} is truncated or corrupt: {_first_line(error)}") from error
    return content


def _refuse_pickles(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(4)
    # A zip is torch.save's container; 0x80 and a protocol number begin every modern pickle.
    if start.startswith(b"PK") or (start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05"):
        raise CheckpointError(
            f"{path} is a pickle, which could run code, and was not opened; a .safetensors file is"
            " accepted"
        )


def _parse_metadata(text: str, path: Path) -> ModelMetadata:
    try:
        values = json.loads(text)
        if values["format"] != _FORMAT:
            raise CheckpointError(f"{path} has format {values['format']}; {_FORMAT} is read")
        metadata = ModelMetadata(**{**values, "classes": tuple(values["classes"])})
        if not isinstance(metadata.model, str) or not isinstance(metadata.model_args, dict):
            raise TypeError("model must be a name and model_args a mapping")
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


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
