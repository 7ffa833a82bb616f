"""The public functions of depthwise_conv2d and its registration."""

from __future__ import annotations

import torch
from torch import Tensor

from vision_ttt.ops._backend import autocast_kind
from vision_ttt.ops._op import Op
from vision_ttt.ops._torch_function import overridable
from vision_ttt.ops.depthwise_conv2d import cpu, triton_backend
from vision_ttt.ops.depthwise_conv2d.contract import BACKWARD_CONTRACT, CONTRACT, Inputs
from vision_ttt.ops.depthwise_conv2d.definition import depthwise_conv2d_definition


def _fake(inputs: Inputs) -> Tensor:
    x, _, height, width = inputs
    torch._check(x.shape[1] == height * width, lambda: "the tokens do not fill the grid")
    return x.new_empty(x.shape)


def _flops(shapes: Inputs) -> int:
    """K² multiply-adds per token and channel."""
    batch, length, channels = shapes.x
    return 2 * batch * length * channels * shapes.weight[-1] ** 2


OP = Op(
    "depthwise_conv2d",
    Inputs,
    CONTRACT,
    depthwise_conv2d_definition,
    {"cpu": cpu.BACKEND, "triton": triton_backend.BACKEND},
    _fake,
    schema="(Tensor x, Tensor weight, SymInt height, SymInt width) -> Tensor",
    backward_schema="(Tensor grad, Tensor x, Tensor weight, SymInt height, SymInt width) "
    "-> (Tensor dx, Tensor dweight)",
    backward_contract=BACKWARD_CONTRACT,
    flops=_flops,
    backward_flops=lambda shapes: 2 * _flops(shapes),  # one part for x, one for the weight
)


@overridable
def depthwise_conv2d(x: Tensor, weight: Tensor, grid: tuple[int, int]) -> Tensor:
    """Convolve each channel of image tokens with a K×K kernel of its own, zero beyond the edges.

    Args:
        x: [B, T, C], the tokens of a grid (h, w) row by row. The kernels copy x unless its last
            axis is contiguous.
        weight: [C, 1, K, K], as of a depth-wise ``nn.Conv2d``, K odd.
        grid: (h, w) with T = h · w.

    Returns:
        [B, T, C], differentiable in x and weight.

    Raises:
        TypeError: a dtype or type is not accepted.
        ValueError: the grid or the weight does not fit x, K is even, or the requested backend does
            not support the call.
    """
    height, width = grid
    return OP(Inputs(x, weight, height, width))


@overridable
def residual_depthwise_conv2d(x: Tensor, weight: Tensor, grid: tuple[int, int]) -> Tensor:
    """x + :func:`depthwise_conv2d` of x, in one pass over memory where float32 permits it.

    The residual is a convolution too, with the tap 1 at the centre, so that the sum of both is one
    convolution by the sum of their kernels. In float32 that rounds like the sum of the results. In
    shorter formats the 1 would hide most digits of the weight: there the results are added.

    Args:
        x, weight, grid: as of :func:`depthwise_conv2d`.

    Returns:
        [B, T, C], differentiable in x and weight.

    Raises:
        TypeError, ValueError: as :func:`depthwise_conv2d`.
    """
    tensors = isinstance(x, Tensor) and isinstance(weight, Tensor) and weight.ndim == 4
    casts = tensors and torch.is_autocast_enabled(autocast_kind(x))
    if not tensors or casts or not x.dtype == weight.dtype == torch.float32:
        return x + depthwise_conv2d(x, weight, grid)
    identity = torch.zeros_like(weight[:1])
    identity[..., weight.shape[-2] // 2, weight.shape[-1] // 2] = 1.0
    return depthwise_conv2d(x, weight + identity, grid)
