"""Opt-in acceleration of models: ``for_inference`` and ``for_training``."""

from vision_ttt.acceleration.evaluation_only import EvaluationOnly
from vision_ttt.acceleration.inference import PACKED_BLOCKS, for_inference
from vision_ttt.acceleration.training import COMPOSITES, for_training, to_plain

__all__ = [
    "COMPOSITES",
    "PACKED_BLOCKS",
    "EvaluationOnly",
    "for_inference",
    "for_training",
    "to_plain",
]
