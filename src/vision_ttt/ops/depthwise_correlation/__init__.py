"""Correlation of two token grids, channel by channel: the weight gradient of a convolution."""

from vision_ttt.ops.depthwise_correlation.op import depthwise_correlation

__all__ = ["depthwise_correlation"]
