"""A linear layer for training, with the matrix products of inference."""

from vision_ttt.ops.linear.op import linear

__all__ = ["linear"]
