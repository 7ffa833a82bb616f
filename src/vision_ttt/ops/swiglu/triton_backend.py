"""The custom op ``vision_ttt::swiglu`` on a GPU: what it serves, and both passes' launches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vision_ttt.ops._native import contiguous_last
from vision_ttt.ops.swiglu.contract import BACKWARD_CONTRACT, CONTRACT
from vision_ttt.ops.swiglu.cpu import swiglu_backward_op, swiglu_op

WIDEST_BLOCK = 256
"""Columns of a program; wider blocks leave more of the last one empty."""
TILE = 2048
"""Numbers of a program's output: 16 of each thread."""


def fits(x: Tensor) -> bool:
    """Whether x has two halves, which is all that the kernels ask for."""
    return x.shape[-1] % 2 == 0


def _launch(kernel: Any, rows: int, hidden: int, *arguments: Any) -> None:
    block = min(1 << (hidden - 1).bit_length(), WIDEST_BLOCK)
    height = TILE // block
    programs = -(-rows // height) * -(-hidden // block)
    options = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}
    kernel[(programs,)](*arguments, rows, HIDDEN=hidden, ROWS=height, BLOCK=block, **options)


def _rows(x: Tensor) -> Tensor:
    """x as a matrix of rows, without a copy where its strides allow it."""
    return contiguous_last(x.reshape(-1, x.shape[-1]))


@swiglu_op.register_kernel("cuda")
@CONTRACT.guards
def swiglu_triton(x: Tensor) -> Tensor:
    """See :func:`vision_ttt.ops.swiglu.swiglu`."""
    from vision_ttt.ops.swiglu import triton_kernels

    rows, hidden = _rows(x), x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], hidden)
    arguments = (rows, out, rows.stride(0))
    with torch.cuda.device_of(x):
        _launch(triton_kernels.forward_kernel, rows.shape[0], hidden, *arguments)
    return out


@swiglu_backward_op.register_kernel("cuda")
@BACKWARD_CONTRACT.guards
def swiglu_triton_backward(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of x [..., 2 H], given that of the output."""
    from vision_ttt.ops.swiglu import triton_kernels

    gradients, rows, dx = _rows(grad), _rows(x), x.new_empty(x.shape)
    arguments = (gradients, rows, dx, gradients.stride(0), rows.stride(0))
    with torch.cuda.device_of(x):
        _launch(triton_kernels.backward_kernel, rows.shape[0], grad.shape[-1], *arguments)
    return dx
