"""A linear layer for training, by the same products as inference."""

from vision_ttt.ops.linear.op import linear

__all__ = ["linear"]
