"""Depth-wise convolution along the sequence that never looks ahead, in either direction."""

from vision_ttt.ops.directional_conv1d import triton_backend  # noqa: F401  (adds it to the op)
from vision_ttt.ops.directional_conv1d.api import directional_conv1d

__all__ = ["directional_conv1d"]
