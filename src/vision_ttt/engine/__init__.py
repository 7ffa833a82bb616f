"""Training and evaluating classifiers: the config, the one loop, checkpoints."""

from vision_ttt.engine.checkpoint import ModelMetadata, load_model
from vision_ttt.engine.config import ConfigError, TrainConfig
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
