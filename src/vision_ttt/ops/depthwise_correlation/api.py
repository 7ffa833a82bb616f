"""The public op: what it computes, its definition in PyTorch, and the way to the CPU kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops._native import kernels_serve
from vision_ttt.ops.depthwise_conv2d.cpu import fits
from vision_ttt.ops.depthwise_correlation.cpu import depthwise_correlation_op


def depthwise_correlation(
    x: Tensor, y: Tensor, grid: tuple[int, int], kernel_size: int = 3
) -> Tensor:
    """Sum y times a shifted x over the grid, for every channel and every shift of a K×K window.

    ``out[c, 0, i, j] = Σ_{b, r, s} x[b, r + i - K//2, s + j - K//2, c] · y[b, r, s, c]`` with x
    zero beyond the edges: the gradient of ``Σ y ⊙ depthwise_conv2d(x, weight, grid)`` with respect
    to the weight.

    Args:
        x: [B, T, C], the tokens of a grid (h, w) row by row; the kernel wants a contiguous last
            axis.
        y: [B, T, C].
        grid: (h, w) with T = h · w.
        kernel_size: K, odd.

    Returns:
        [C, 1, K, K], differentiable in x and y.
    """
    if kernels_serve(x, y) and fits(x):
        return depthwise_correlation_op(x, y, *grid, kernel_size)
    height, width = grid
    reach = kernel_size // 2
    image = F.pad(x.unflatten(1, grid), (0, 0, reach, reach, reach, reach))  # [B, h + …, w + …, C]
    other = y.unflatten(1, grid)
    taps = [
        (image[:, i : i + height, j : j + width] * other).sum((0, 1, 2))
        for i in range(kernel_size)
        for j in range(kernel_size)
    ]
    return torch.stack(taps, dim=1).view(-1, 1, kernel_size, kernel_size)
