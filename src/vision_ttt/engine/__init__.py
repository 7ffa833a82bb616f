"""Training and evaluating models of any task: the config, the one loop, checkpoints."""

from typing import TYPE_CHECKING

from vision_ttt._lazy import lazy_exports
from vision_ttt.engine.config import ConfigError, TrainConfig

if TYPE_CHECKING:
    from vision_ttt.engine.checkpoint import ModelMetadata
    from vision_ttt.engine.non_finite import NonFiniteError
    from vision_ttt.engine.stopping import Preempted
    from vision_ttt.engine.task import Task
    from vision_ttt.engine.tensor_files import CheckpointError
    from vision_ttt.engine.train import TrainResult, train

__all__ = [
    "TrainConfig",
    "train",
    "TrainResult",
    "Task",
    "ModelMetadata",
    "ConfigError",
    "CheckpointError",
    "NonFiniteError",
    "Preempted",
]

# The config can be read, and a recipe refused, without PyTorch.
lazy_exports(
    __name__,
    {
        "train": "train",
        "TrainResult": "train",
        "Task": "task",
        "ModelMetadata": "checkpoint",
        "CheckpointError": "tensor_files",
        "NonFiniteError": "non_finite",
        "Preempted": "stopping",
    },
    extra="train",
)
