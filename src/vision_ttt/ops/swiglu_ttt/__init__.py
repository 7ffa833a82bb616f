"""A SwiGLU as inner model: one full-batch gradient step, and its outputs."""

from vision_ttt.ops.swiglu_ttt.gradient_norms import swiglu_ttt_gradient_norms
from vision_ttt.ops.swiglu_ttt.op import swiglu_ttt

__all__ = ["swiglu_ttt", "swiglu_ttt_gradient_norms"]
