"""The public op: what it computes, and the way to the CPU kernel."""

from __future__ import annotations

from torch import Tensor

from vision_ttt.ops._native import kernels_serve
from vision_ttt.ops._overriding import overridable
from vision_ttt.ops.depthwise_conv2d.cpu import fits
from vision_ttt.ops.depthwise_correlation.contract import CONTRACT
from vision_ttt.ops.depthwise_correlation.cpu import depthwise_correlation_op
from vision_ttt.ops.depthwise_correlation.reference import depthwise_correlation_reference


@overridable
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

    Raises:
        TypeError: a dtype or type is not accepted.
        ValueError: x, y and the grid do not fit, or K is even.
    """
    arguments = x, y, *grid, kernel_size
    CONTRACT.check(dict(zip(CONTRACT.names, arguments, strict=True)))
    if kernels_serve(x, y) and fits(x):
        return depthwise_correlation_op(*arguments)
    return depthwise_correlation_reference(*arguments)
