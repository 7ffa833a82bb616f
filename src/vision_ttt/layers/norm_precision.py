"""Norms of tokens that may be in a lower precision than the norm's parameters."""

from __future__ import annotations

from torch import Tensor, nn


def normalised(norm: nn.Module, x: Tensor) -> Tensor:
    """Return norm(x), computed in the dtype of the norm's weight, if it has one.

    CUDA's autocast casts the input of a LayerNorm to float32; a CPU's does not. PyTorch then sums
    the gradients of weight and bias over all tokens in bfloat16, which is inexact for many.
    """
    weight = getattr(norm, "weight", None)
    return norm(x if weight is None else x.to(weight.dtype))
