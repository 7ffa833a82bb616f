"""The public op: what it computes, and the way to the kernels."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops._native import kernels_serve
from vision_ttt.ops._overriding import overridable
from vision_ttt.ops._triton import triton_serves
from vision_ttt.ops.swiglu import cpu, triton_backend
from vision_ttt.ops.swiglu.contract import CONTRACT, IN_PLACE_CONTRACT
from vision_ttt.ops.swiglu.reference import swiglu_reference


@overridable
def swiglu(x: Tensor) -> Tensor:
    """SiLU(a) ⊙ b of x's halves a, b along the last axis: [..., 2 H] → [..., H].

    Raises:
        TypeError: x is no tensor of a floating dtype.
        ValueError: x's last axis has no halves.
    """
    CONTRACT.check({"x": x})
    if (kernels_serve(x) and cpu.fits(x)) or (triton_serves(x) and triton_backend.fits(x)):
        return cpu.swiglu_op(x)
    return swiglu_reference(x)


def swiglu_(x: Tensor) -> Tensor:
    """:func:`swiglu` for inference: where that is faster in x's own memory, of which it is a view.

    On a GPU it is not: the matrix product that follows reads a dense tensor, of half the memory.

    Args:
        x: [..., 2 H], contiguous, with no gradient to come. Its values may be gone.

    Raises:
        TypeError, ValueError: as :func:`swiglu`; x is not contiguous.
    """
    IN_PLACE_CONTRACT.check({"x": x})
    if triton_serves(x) and triton_backend.fits(x):
        return cpu.swiglu_op(x)
    gate, value = x.chunk(2, dim=-1)
    if kernels_serve(x) and cpu.fits(x):
        cpu.swiglu_in_place_op(x)
        return gate
    return F.silu(gate, inplace=True).mul_(value)
