"""Depth-wise convolution along the sequence, causal in the scan direction of each channel."""

from vision_ttt.ops.directional_conv1d.op import directional_conv1d

__all__ = ["directional_conv1d"]
