"""Depth-wise convolution of image tokens on their grid."""

from vision_ttt.ops.depthwise_conv2d.op import depthwise_conv2d, residual_depthwise_conv2d

__all__ = ["depthwise_conv2d", "residual_depthwise_conv2d"]
