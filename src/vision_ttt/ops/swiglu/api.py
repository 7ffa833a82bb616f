"""The public op: what it computes, its definition in PyTorch, and the way to the CPU kernel."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops._native import kernels_serve
from vision_ttt.ops.swiglu.cpu import fits, swiglu_in_place_op, swiglu_op


def swiglu(x: Tensor) -> Tensor:
    """SiLU(a) ⊙ b of x's halves a, b along the last axis: [..., 2 H] → [..., H]."""
    if kernels_serve(x) and fits(x):
        return swiglu_op(x)
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


def swiglu_(x: Tensor) -> Tensor:
    """:func:`swiglu` in x's own memory, for inference: returns a view of x, whose values are gone.

    Args:
        x: [..., 2 H], contiguous, with no gradient to come.
    """
    gate, value = x.chunk(2, dim=-1)
    if kernels_serve(x) and fits(x):
        swiglu_in_place_op(x)
        return gate
    return F.silu(gate, inplace=True).mul_(value)
