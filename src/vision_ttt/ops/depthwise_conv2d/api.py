"""The public op: what it computes, its definition in PyTorch, and the way to the kernels."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops._native import kernels_serve
from vision_ttt.ops._triton import triton_serves
from vision_ttt.ops.depthwise_conv2d.cpu import depthwise_conv2d_op, fits


def depthwise_conv2d(x: Tensor, weight: Tensor, grid: tuple[int, int]) -> Tensor:
    """Convolve each channel of image tokens with a K×K kernel of its own, zero beyond the edges.

    Args:
        x: [B, T, C], the tokens of a grid (h, w) row by row; the kernels want a contiguous last
            axis.
        weight: [C, 1, K, K], as of a depth-wise ``nn.Conv2d``, K odd.
        grid: (h, w) with T = h · w.

    Returns:
        [B, T, C], differentiable in x and weight.

    Raises:
        ValueError: the grid or the weight do not fit x, or K is even.
    """
    _, length, channels = x.shape
    kernel = weight.shape[-1]
    if weight.shape != (channels, 1, kernel, kernel) or kernel % 2 == 0:
        raise ValueError(
            f"x {list(x.shape)} wants weight [{channels}, 1, K, K] with K odd, "
            f"got {list(weight.shape)}"
        )
    if grid[0] * grid[1] != length:
        raise ValueError(f"x {list(x.shape)} wants a grid of {length} tokens, got {tuple(grid)}")
    if (kernels_serve(x, weight) and fits(x)) or triton_serves(x, weight):
        return depthwise_conv2d_op(x, weight, *grid)
    # Tokens are the channels-last memory format already: no copy on the way in or out.
    image = x.unflatten(1, grid).permute(0, 3, 1, 2)  # [B, C, h, w]
    image = F.conv2d(image, weight, padding=kernel // 2, groups=channels)
    return image.permute(0, 2, 3, 1).flatten(1, 2)  # [B, T, C]
