"""swiglu on a GPU: the launches of both passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vision_ttt.ops import _triton
from vision_ttt.ops._native import contiguous_last
from vision_ttt.ops._op import Backend
from vision_ttt.ops.swiglu.contract import Inputs

WIDEST_BLOCK = 256
"""The most columns of a program. In wider blocks the last one would be emptier."""
TILE = 2048
"""Output numbers of a program: 16 per thread."""


def _launch(kernel: Any, rows: int, hidden: int, *arguments: Any) -> None:
    block = min(1 << (hidden - 1).bit_length(), WIDEST_BLOCK)
    height = TILE // block
    programs = -(-rows // height) * -(-hidden // block)
    options = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}
    kernel[(programs,)](*arguments, rows, HIDDEN=hidden, ROWS=height, BLOCK=block, **options)


def _rows(x: Tensor) -> Tensor:
    """x as a matrix of rows, without a copy where its strides allow it."""
    return contiguous_last(x.reshape(-1, x.shape[-1]))


def _forward(inputs: Inputs) -> Tensor:
    from vision_ttt.ops.swiglu import triton_kernels

    x = inputs.x
    rows, hidden = _rows(x), x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], hidden)
    arguments = (rows, out, rows.stride(0))
    with torch.cuda.device_of(x):
        _launch(triton_kernels.forward_kernel, rows.shape[0], hidden, *arguments)
    return out


def _backward(inputs: Inputs, grad: Tensor) -> Tensor:
    from vision_ttt.ops.swiglu import triton_kernels

    x = inputs.x
    gradients, rows, dx = _rows(grad), _rows(x), x.new_empty(x.shape)
    arguments = (gradients, rows, dx, gradients.stride(0), rows.stride(0))
    with torch.cuda.device_of(x):
        _launch(triton_kernels.backward_kernel, rows.shape[0], grad.shape[-1], *arguments)
    return dx


BACKEND = Backend(_forward, _backward, lambda inputs: _triton.refusal(inputs.x))
