"""The MLP branch of a block in one op: norm, SwiGLU MLP and residual."""

from vision_ttt.ops.normed_swiglu_mlp.op import normed_swiglu_mlp

__all__ = ["normed_swiglu_mlp"]
