"""Training and evaluating classifiers: the config, the one loop, checkpoints."""

from typing import TYPE_CHECKING

from vision_ttt._late import offer_late
from vision_ttt.engine.config import ConfigError, TrainConfig

if TYPE_CHECKING:
    from vision_ttt.engine.checkpoint import ModelMetadata, load_model
    from vision_ttt.engine.evaluate import Evaluation, evaluate
    from vision_ttt.engine.faults import NonFiniteError, Preempted
    from vision_ttt.engine.tensor_files import CheckpointError
    from vision_ttt.engine.train import TrainResult, train

__all__ = [
    "TrainConfig",
    "train",
    "TrainResult",
    "evaluate",
    "Evaluation",
    "load_model",
    "ModelMetadata",
    "ConfigError",
    "CheckpointError",
    "NonFiniteError",
    "Preempted",
]

# The config can be read, and a recipe refused, without PyTorch.
offer_late(
    __name__,
    {
        "train": "train",
        "TrainResult": "train",
        "evaluate": "evaluate",
        "Evaluation": "evaluate",
        "load_model": "checkpoint",
        "ModelMetadata": "checkpoint",
        "CheckpointError": "tensor_files",
        "NonFiniteError": "faults",
        "Preempted": "faults",
    },
    extra="train",
)
