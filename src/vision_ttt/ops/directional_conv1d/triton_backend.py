"""The op on a GPU: both passes' launches, which stand behind the CPU kernels' custom ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vision_ttt.ops._native import contiguous_last
from vision_ttt.ops.directional_conv1d.contract import BACKWARD_CONTRACT, CONTRACT
from vision_ttt.ops.directional_conv1d.cpu import (
    directional_conv1d_backward_op,
    directional_conv1d_op,
)

TILE = (64, 64)
"""Tokens and channels of a program; in bfloat16 a token's are one line of the cache."""


def _tiles(x: Tensor) -> int:
    """Tiles of tokens in all images of x [B, T, C]."""
    return x.shape[0] * -(-x.shape[1] // TILE[0])


def _launch(kernel: Any, x: Tensor, weight: Tensor, reverse_channels: int, *arguments: Any) -> None:
    _, length, channels = x.shape
    forward_channels = channels - reverse_channels
    blocks = sum(-(-part // TILE[1]) for part in (forward_channels, reverse_channels))
    sizes = (length, channels, forward_channels, weight.shape[-1], *TILE)
    with torch.cuda.device_of(x):
        kernel[(_tiles(x) * blocks,)](
            *(*arguments, *sizes),
            num_warps=2 * x.element_size(),  # a thread then loads 4 times 16 bytes
            num_stages=1,
            enable_fp_fusion=True,
        )


@directional_conv1d_op.register_kernel("cuda")
@CONTRACT.guards
def directional_conv1d_triton(
    x: Tensor, weight: Tensor, bias: Tensor, reverse_channels: int
) -> Tensor:
    """Compute what the CPU kernel does, in float32, rounded to x's dtype at the end."""
    from vision_ttt.ops.directional_conv1d.triton_kernels import forward_kernel

    x, weight, bias = contiguous_last(x), weight.contiguous(), bias.contiguous()
    y = x.new_empty(x.shape)
    _launch(forward_kernel, x, weight, reverse_channels, x, weight, bias, y, *x.stride()[:2])
    return y


@directional_conv1d_backward_op.register_kernel("cuda")
@BACKWARD_CONTRACT.guards
def directional_conv1d_triton_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, reverse_channels: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what the CPU kernel does, each gradient in its tensor's dtype."""
    from vision_ttt.ops.directional_conv1d.triton_kernels import backward_kernel

    grad, x, weight = contiguous_last(grad), contiguous_last(x), weight.contiguous()
    _, _, taps = weight.shape
    dx = x.new_empty(x.shape)
    # PyTorch adds the tiles' shares up in an order that does not change.
    shares = x.new_empty(_tiles(x), taps + 1, x.shape[-1], dtype=torch.float32)
    _launch(
        backward_kernel,
        *(x, weight, reverse_channels),
        *(grad, x, weight, dx, shares, *grad.stride()[:2], *x.stride()[:2]),
    )
    total = shares.sum(0)
    dweight = total[:taps].t().unsqueeze(1).to(weight.dtype).contiguous()
    return dx, dweight, total[taps].to(bias.dtype, copy=True)
