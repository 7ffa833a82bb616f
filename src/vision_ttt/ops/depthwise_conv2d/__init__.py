"""Depth-wise convolution of image tokens on their grid."""

from vision_ttt.ops.depthwise_conv2d import triton_backend  # noqa: F401  (adds it to the op)
from vision_ttt.ops.depthwise_conv2d.api import depthwise_conv2d

__all__ = ["depthwise_conv2d"]
