"""directional_conv1d on a GPU: the launches of both passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vision_ttt.ops import _triton
from vision_ttt.ops._native import contiguous_last
from vision_ttt.ops._op import Backend
from vision_ttt.ops.directional_conv1d.contract import Inputs

TILE = (64, 64)
"""Tokens and channels of a program: in bfloat16 one cache line per token."""


def _tiles(x: Tensor) -> int:
    """The number of tiles of tokens in all images of x [B, T, C]."""
    return x.shape[0] * -(-x.shape[1] // TILE[0])


def _launch(kernel: Any, x: Tensor, weight: Tensor, reverse_channels: int, *arguments: Any) -> None:
    _, length, channels = x.shape
    forward_channels = channels - reverse_channels
    blocks = sum(-(-part // TILE[1]) for part in (forward_channels, reverse_channels))
    sizes = (length, channels, forward_channels, weight.shape[-1], *TILE)
    with torch.cuda.device_of(x):
        kernel[(_tiles(x) * blocks,)](
            *(*arguments, *sizes),
            num_warps=2 * x.element_size(),  # every thread loads 4 times 16 bytes
            num_stages=1,
            enable_fp_fusion=True,
        )


def _forward(inputs: Inputs) -> Tensor:
    from vision_ttt.ops.directional_conv1d.triton_kernels import forward_kernel

    x, weight, bias, reverse_channels = inputs
    x, weight, bias = contiguous_last(x), weight.contiguous(), bias.contiguous()
    y = x.new_empty(x.shape)
    _launch(forward_kernel, x, weight, reverse_channels, x, weight, bias, y, *x.stride()[:2])
    return y


def _backward(inputs: Inputs, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from vision_ttt.ops.directional_conv1d.triton_kernels import backward_kernel

    x, weight, bias, reverse_channels = inputs
    grad, x, weight = contiguous_last(grad), contiguous_last(x), weight.contiguous()
    _, _, taps = weight.shape
    dx = x.new_empty(x.shape)
    # PyTorch sums the shares of the tiles in a fixed order.
    shares = x.new_empty(_tiles(x), taps + 1, x.shape[-1], dtype=torch.float32)
    _launch(
        backward_kernel,
        *(x, weight, reverse_channels),
        *(grad, x, weight, dx, shares, *grad.stride()[:2], *x.stride()[:2]),
    )
    total = shares.sum(0)
    dweight = total[:taps].t().unsqueeze(1).to(weight.dtype).contiguous()
    return dx, dweight, total[taps].to(bias.dtype, copy=True)


BACKEND = Backend(_forward, _backward, lambda inputs: _triton.refusal(*inputs[:3]))
