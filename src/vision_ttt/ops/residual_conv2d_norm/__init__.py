"""The residual Conv2d of image tokens and the norm behind it, in one op."""

from vision_ttt.ops.residual_conv2d_norm.op import residual_conv2d_norm

__all__ = ["residual_conv2d_norm"]
