"""Depth-wise convolution along the sequence that never looks ahead, in either direction."""

from vision_ttt.ops.directional_conv1d.op import directional_conv1d

__all__ = ["directional_conv1d"]
