"""A whole SwiGLU MLP in one op that keeps nothing but its input."""

from vision_ttt.ops.swiglu_mlp.op import swiglu_mlp

__all__ = ["swiglu_mlp"]
