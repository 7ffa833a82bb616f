"""Weights with their description: what one evaluates, shares and loads.

A file holds the weights and, as JSON metadata, everything needed to build the model and feed it.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vision_ttt._version import __version__
from vision_ttt.engine.described import check_number, read_json
from vision_ttt.engine.section import NOT_NEGATIVE
from vision_ttt.engine.state import read_state
from vision_ttt.engine.tensor_files import (
    CheckpointError,
    inspect_tensors,
    read_tensors,
    write_tensors,
)

WEIGHTS_FILE = "last.safetensors"
"""In a run directory, the weights at the last checkpoint."""
BEST_FILE = "best.safetensors"
"""In a run directory, the weights at the best evaluation."""
CHECKPOINTS = "checkpoints"
"""Sub-folder of a run directory for the states one resumes from, update-NUMBER.safetensors."""
_FORMAT = 2


@dataclass(frozen=True)
class ModelMetadata:
    """What a weights file says about itself."""

    task: dict[str, Any]
    """The section `task` of the run that trained the model; `name` at least."""
    model: str
    """Name of the model."""
    model_args: dict[str, Any]
    """The arguments that its task builds it with."""
    carried: dict[str, Any]
    """What the task needs to use the model, as `Task.carried` returns it."""
    data: dict[str, Any] = field(default_factory=dict)
    """The section `data` of that run; empty where the weights come from elsewhere."""
    epoch: int = 0
    """Whole epochs trained."""
    update: int = 0
    """Optimiser updates made."""
    averaged: bool = False
    """Whether the weights are an exponential moving average."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last evaluation, e.g. test_loss."""
    vision_ttt: str = __version__
    """Version that wrote the file."""
    format: int = _FORMAT
    """Version of this list of fields."""

    def __post_init__(self) -> None:
        for name in ("task", "model_args", "carried", "data", "metrics"):
            if not isinstance(getattr(self, name), dict):
                raise TypeError(f"{name} must be a mapping")
        if not isinstance(self.model, str):
            raise TypeError("model must be a name")
        for name in ("epoch", "update"):
            check_number(name, getattr(self, name), NOT_NEGATIVE, whole=True)


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


def read_weights(path: str | Path) -> tuple[dict[str, Tensor], ModelMetadata]:
    """Return the weights and the metadata of a file that `save_weights` wrote.

    The file may also be one of a run's states to resume from. Its weights, those that were
    evaluated, are then returned with the metadata of the run's last weights, because a state does
    not describe its model.

    Raises:
        FileNotFoundError: there is no such file, or no last weights of the run.
        CheckpointError: the file is truncated, damaged, a pickle (which is not opened), not one of
            ours, or of another run than the last weights.
    """
    path = Path(path)
    folder = path.absolute().parent
    if folder.name != CHECKPOINTS or not path.name.startswith("update-"):
        weights, text = read_tensors(path)
        return weights, _metadata(path, text)
    saved = read_state(path)
    state, last = saved.state, folder.parent / WEIGHTS_FILE
    described = read_metadata(last)
    if any(state.config.get(name) != getattr(described, name) for name in ("task", "data")):
        raise CheckpointError(f"{path} is of another run than {last}, which describes its model")
    metadata = replace(
        described, epoch=state.epoch, update=state.update, metrics=state.test_metrics
    )
    return saved.average or saved.model, metadata


def read_metadata(path: Path) -> ModelMetadata:
    """Return the metadata of a file that `save_weights` wrote, reading its first bytes alone.

    The weights are not looked at: that they are whole is known when `read_weights` reads them.

    Raises:
        FileNotFoundError, CheckpointError: as `read_weights`.
    """
    return _metadata(path, inspect_tensors(path, hashing=False).text)


def _metadata(path: Path, text: str | None) -> ModelMetadata:
    if text is None:
        raise CheckpointError(
            f"{path} has no vision-ttt metadata: it does not say which model it is"
        )
    try:
        values = read_json(text)
        if values["format"] != _FORMAT:
            raise CheckpointError(f"{path} has format {values['format']}; {_FORMAT} is read")
        return ModelMetadata(**values)
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path} has damaged vision-ttt metadata: {reason}") from error
