"""depthwise_conv2d on a GPU: the launches of both passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vision_ttt.ops import _triton
from vision_ttt.ops._native import contiguous_last
from vision_ttt.ops._op import Backend
from vision_ttt.ops.depthwise_conv2d.contract import Inputs

PATCH = (8, 8)
"""Rows and columns of a program. A square has the fewest neighbours, which are read too."""
CHANNELS = 64
"""Channels of a program: in bfloat16 one cache line per token."""


def _patches(x: Tensor, grid: tuple[int, ...]) -> int:
    """The number of patches in all images of x [B, T, C]."""
    down, across = (-(-size // part) for size, part in zip(grid, PATCH, strict=True))
    return x.shape[0] * down * across


def _launch(kernel: Any, x: Tensor, weight: Tensor, grid: tuple[int, ...], *arguments: Any) -> None:
    channels = x.shape[-1]
    programs = _patches(x, grid) * -(-channels // CHANNELS)
    sizes = (*grid, channels, weight.shape[-1], *PATCH, CHANNELS)
    with torch.cuda.device_of(x):
        kernel[(programs,)](
            *(*arguments, *sizes),
            num_warps=2 * x.element_size(),  # every thread loads 4 times 16 bytes
            num_stages=1,
            enable_fp_fusion=True,
        )


def _forward(inputs: Inputs) -> Tensor:
    from vision_ttt.ops.depthwise_conv2d.triton_kernels import forward_kernel

    x, weight = contiguous_last(inputs.x), inputs.weight.contiguous()
    grid = inputs.grid()
    y = x.new_empty(x.shape)
    _launch(forward_kernel, x, weight, grid, x, weight, y, *x.stride()[:2])
    return y


def _backward(inputs: Inputs, grad: Tensor) -> tuple[Tensor, Tensor]:
    from vision_ttt.ops.depthwise_conv2d.triton_kernels import backward_kernel

    grad, x = contiguous_last(grad), contiguous_last(inputs.x)
    weight, grid = inputs.weight.contiguous(), inputs.grid()
    dx = x.new_empty(x.shape)
    # PyTorch sums the shares of the patches in a fixed order.
    taps = weight.shape[-1] ** 2
    shares = x.new_empty(_patches(x, grid), taps, x.shape[-1], dtype=torch.float32)
    _launch(
        backward_kernel,
        *(x, weight, grid),
        *(grad, x, weight, dx, shares, *grad.stride()[:2], *x.stride()[:2]),
    )
    dweight = shares.sum(0).t().to(weight.dtype).contiguous()
    return dx, dweight.view(weight.shape)


BACKEND = Backend(_forward, _backward, lambda inputs: _triton.refusal(*inputs[:2]))
