"""The public op: what it computes, and the way to the kernels."""

from __future__ import annotations

from torch import Tensor

from vision_ttt.ops._native import kernels_serve
from vision_ttt.ops._overriding import overridable
from vision_ttt.ops._triton import triton_serves
from vision_ttt.ops.depthwise_conv2d.contract import CONTRACT
from vision_ttt.ops.depthwise_conv2d.cpu import depthwise_conv2d_op, fits
from vision_ttt.ops.depthwise_conv2d.reference import depthwise_conv2d_reference


@overridable
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
        TypeError: a dtype or type is not accepted.
        ValueError: the grid or the weight do not fit x, or K is even.
    """
    height, width = grid
    CONTRACT.check({"x": x, "weight": weight, "height": height, "width": width})
    if (kernels_serve(x, weight) and fits(x)) or triton_serves(x, weight):
        return depthwise_conv2d_op(x, weight, height, width)
    return depthwise_conv2d_reference(x, weight, height, width)
