"""The public function of depthwise_correlation and its registration.

The correlation of two token grids, channel by channel, is the weight gradient of a convolution.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vision_ttt.ops._op import Op
from vision_ttt.ops._torch_function import overridable
from vision_ttt.ops.depthwise_conv2d.op import OP as CONVOLUTION
from vision_ttt.ops.vit3_ttt import cpu
from vision_ttt.ops.vit3_ttt.contract import CONTRACT, Inputs
from vision_ttt.ops.vit3_ttt.definition import depthwise_correlation_definition


def _fake(inputs: Inputs) -> Tensor:
    x, _, height, width, kernel_size = inputs
    torch._check(x.shape[1] == height * width, lambda: "the tokens do not fill the grid")
    return x.new_empty(x.shape[-1], 1, kernel_size, kernel_size)


def _backward(inputs: Inputs, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The op is linear in x and in y, and both of its derivatives are convolutions."""
    dx = CONVOLUTION.forward_op(inputs.y, grad.flip(-2, -1), *inputs.grid())
    dy = CONVOLUTION.forward_op(inputs.x, grad, *inputs.grid())
    return dx, dy


def _flops(shapes: Inputs) -> int:
    """K² multiply-adds per token and channel."""
    batch, length, channels = shapes.x
    return 2 * batch * length * channels * shapes.kernel_size**2


OP = Op(
    "depthwise_correlation",
    Inputs,
    CONTRACT,
    depthwise_correlation_definition,
    {"cpu": cpu.BACKEND},
    _fake,
    schema="(Tensor x, Tensor y, SymInt height, SymInt width, SymInt kernel_size) -> Tensor",
    composed_backward=_backward,
    flops=_flops,
)


@overridable
def depthwise_correlation(
    x: Tensor, y: Tensor, grid: tuple[int, int], kernel_size: int = 3
) -> Tensor:
    """Sum y times a shifted x over the grid, for every channel and every shift of a K×K window.

    ``out[c, 0, i, j] = Σ_{b, r, s} x[b, r + i - K//2, s + j - K//2, c] · y[b, r, s, c]`` with x
    zero beyond the edges: the gradient of ``Σ y ⊙ depthwise_conv2d(x, weight, grid)`` with respect
    to the weight.

    Args:
        x: [B, T, C], the tokens of a grid (h, w) row by row. The kernel copies x unless its last
            axis is contiguous.
        y: [B, T, C].
        grid: (h, w) with T = h · w.
        kernel_size: K, odd.

    Returns:
        [C, 1, K, K], differentiable in x and y.

    Raises:
        TypeError: a dtype or type is not accepted.
        ValueError: x, y and the grid do not fit, K is even, or the requested backend does not
            support the call.
    """
    height, width = grid
    return OP(Inputs(x, y, height, width, kernel_size))
