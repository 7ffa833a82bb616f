"""Stateless sequence ops, one folder per op."""

from vision_ttt.ops._backend import use_backend
from vision_ttt.ops.ttt_linear import ttt_linear

__all__ = ["ttt_linear", "use_backend"]
