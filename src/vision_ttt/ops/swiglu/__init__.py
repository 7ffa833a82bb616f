"""The activation of a SwiGLU MLP in one pass over memory."""

from vision_ttt.ops.swiglu.api import swiglu, swiglu_

__all__ = ["swiglu", "swiglu_"]
