"""The op on a GPU: both passes' launches, which stand behind the CPU kernels' custom ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vision_ttt.ops._native import contiguous_last
from vision_ttt.ops.depthwise_conv2d.contract import BACKWARD_CONTRACT, CONTRACT
from vision_ttt.ops.depthwise_conv2d.cpu import depthwise_conv2d_backward_op, depthwise_conv2d_op

PATCH = (8, 8)
"""Rows and columns of a program: as square as can be, since it reads the tokens around it too."""
CHANNELS = 64
"""Channels of a program; in bfloat16 a token's are one line of the cache."""


def _patches(x: Tensor, grid: tuple[int, ...]) -> int:
    """Patches in all images of x [B, T, C]."""
    down, across = (-(-size // part) for size, part in zip(grid, PATCH, strict=True))
    return x.shape[0] * down * across


def _launch(kernel: Any, x: Tensor, weight: Tensor, grid: tuple[int, ...], *arguments: Any) -> None:
    channels = x.shape[-1]
    programs = _patches(x, grid) * -(-channels // CHANNELS)
    sizes = (*grid, channels, weight.shape[-1], *PATCH, CHANNELS)
    with torch.cuda.device_of(x):
        kernel[(programs,)](
            *(*arguments, *sizes),
            num_warps=2 * x.element_size(),  # a thread then loads 4 times 16 bytes
            num_stages=1,
            enable_fp_fusion=True,
        )


@depthwise_conv2d_op.register_kernel("cuda")
@CONTRACT.guards
def depthwise_conv2d_triton(x: Tensor, weight: Tensor, *grid: int) -> Tensor:
    """Compute what the CPU kernel does, in float32, rounded to x's dtype at the end."""
    from vision_ttt.ops.depthwise_conv2d.triton_kernels import forward_kernel

    x, weight = contiguous_last(x), weight.contiguous()
    y = x.new_empty(x.shape)
    _launch(forward_kernel, x, weight, grid, x, weight, y, *x.stride()[:2])
    return y


@depthwise_conv2d_backward_op.register_kernel("cuda")
@BACKWARD_CONTRACT.guards
def depthwise_conv2d_triton_backward(
    grad: Tensor, x: Tensor, weight: Tensor, *grid: int
) -> tuple[Tensor, Tensor]:
    """Compute what the CPU kernel does, each gradient in its tensor's dtype."""
    from vision_ttt.ops.depthwise_conv2d.triton_kernels import backward_kernel

    grad, x, weight = contiguous_last(grad), contiguous_last(x), weight.contiguous()
    dx = x.new_empty(x.shape)
    # PyTorch adds the patches' shares up in an order that does not change.
    taps = weight.shape[-1] ** 2
    shares = x.new_empty(_patches(x, grid), taps, x.shape[-1], dtype=torch.float32)
    _launch(
        backward_kernel,
        *(x, weight, grid),
        *(grad, x, weight, dx, shares, *grad.stride()[:2], *x.stride()[:2]),
    )
    dweight = shares.sum(0).t().to(weight.dtype).contiguous()
    return dx, dweight.view(weight.shape)
