"""A SwiGLU as inner model: one full-batch gradient step, and its outputs."""

from vision_ttt.ops.swiglu_ttt.op import swiglu_ttt

__all__ = ["swiglu_ttt"]
