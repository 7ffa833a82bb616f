"""Fast inference on a CPU: an explicit copy of a model whose blocks run on packed weights."""

from vision_ttt.inference.conversion import PACKED_BLOCKS, for_inference
from vision_ttt.inference.evaluation_only import EvaluationOnly

__all__ = ["PACKED_BLOCKS", "EvaluationOnly", "for_inference"]
