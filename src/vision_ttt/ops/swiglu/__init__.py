"""The activation of a SwiGLU MLP in one pass over memory."""

from vision_ttt.ops.swiglu.op import swiglu

__all__ = ["swiglu"]
