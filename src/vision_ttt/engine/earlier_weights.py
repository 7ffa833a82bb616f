"""The weights that a run had at one of the checkpoints that it resumes from."""

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from vision_ttt.engine.checkpoint import (
    CHECKPOINTS,
    WEIGHTS_FILE,
    ModelMetadata,
    read_metadata,
)
from vision_ttt.engine.state import read_state
from vision_ttt.engine.tensor_files import CheckpointError


def is_earlier(path: Path) -> bool:
    """Whether a path is that of a run's checkpoint to resume from, by its place in the run."""
    return path.parent.name == CHECKPOINTS and path.name.startswith("update-")


def read_earlier_weights(path: Path) -> tuple[dict[str, Tensor], ModelMetadata]:
    """Return the weights that were evaluated at a checkpoint of a run, and their description.

    A checkpoint to resume from does not describe its model: the run's last weights do.

    Raises:
        FileNotFoundError: there is no such checkpoint, or no weights file beside its folder.
        CheckpointError: either is damaged, or they are of two runs.
    """
    saved = read_state(path)
    last = path.parent.parent / WEIGHTS_FILE
    described = read_metadata(last)
    config = saved.state.config
    own = {"task": config.get("task"), "data": config.get("data")}
    if own != {"task": described.task, "data": described.data}:
        raise CheckpointError(f"{path} is of another run than {last}, which describes its model")
    metadata = replace(
        described,
        epoch=saved.state.epoch,
        update=saved.state.update,
        metrics=saved.state.test_metrics,
    )
    return saved.average or saved.model, metadata
