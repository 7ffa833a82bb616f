"""A wide and a narrow linear layer of the same input, in one op for training."""

from vision_ttt.ops.linear_pair.op import linear_pair

__all__ = ["linear_pair"]
