"""The public function of residual_conv2d_norm and its registration."""

from __future__ import annotations

import torch
from torch import Tensor

from vision_ttt.ops._op import Op
from vision_ttt.ops._torch_function import overridable
from vision_ttt.ops.residual_conv2d_norm import cpu
from vision_ttt.ops.residual_conv2d_norm.contract import BACKWARD_CONTRACT, CONTRACT, Inputs
from vision_ttt.ops.residual_conv2d_norm.definition import (
    residual_conv2d_norm_composition,
    residual_conv2d_norm_definition,
)

_TENSORS = "Tensor x, Tensor weight, Tensor norm_weight, Tensor norm_bias"
_OPTIONS = "SymInt height, SymInt width, float eps"


def _fake(inputs: Inputs) -> tuple[Tensor, Tensor]:
    x, height, width = inputs.x, inputs.height, inputs.width
    torch._check(x.shape[1] == height * width, lambda: "the tokens do not fill the grid")
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _flops(shapes: Inputs) -> int:
    """K² multiply-adds per token and channel."""
    batch, length, channels = shapes.x
    return 2 * batch * length * channels * shapes.weight[-1] ** 2


OP = Op(
    "residual_conv2d_norm",
    Inputs,
    CONTRACT,
    residual_conv2d_norm_definition,
    {"cpu": cpu.BACKEND},
    _fake,
    schema=f"({_TENSORS}, {_OPTIONS}) -> (Tensor y, Tensor normed)",
    backward_schema=f"(Tensor grad_y, Tensor grad_normed, {_TENSORS}, {_OPTIONS}) "
    f"-> ({_TENSORS.replace('Tensor ', 'Tensor d')})",
    backward_contract=BACKWARD_CONTRACT,
    composition=residual_conv2d_norm_composition,
    results=2,
    flops=_flops,
    backward_flops=lambda shapes: 3 * _flops(shapes),  # one part for y again
)


@overridable
def residual_conv2d_norm(
    x: Tensor,
    weight: Tensor,
    norm: tuple[Tensor, Tensor],
    grid: tuple[int, int],
    *,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """y = x + DWConv(x) and LN(y): the first lines of Vision-TTT's Algorithm 1.

    It is the composition of :func:`vision_ttt.ops.depthwise_conv2d`, the sum and ``layer_norm``.
    The kernel normalises a token in the cache; its backward pass computes y again, so that only x
    is kept, and adds the gradients of both results there. It supports float32 on a CPU; all other
    calls run the composition.

    Args:
        x: [B, T, C], the tokens of a grid (h, w) row by row.
        weight: [C, 1, K, K], as of a depth-wise ``nn.Conv2d``, K odd.
        norm: weight and bias [C].
        grid: (h, w) with T = h · w.
        eps: added to the norm's variance.

    Returns:
        y and LN(y), both [B, T, C], differentiable in every tensor.

    Raises:
        TypeError: a dtype or type is not accepted.
        ValueError: the grid or a parameter does not fit x, K is even, or the requested backend does
            not support the call.
    """
    return OP(Inputs(x, weight, *norm, *grid, eps))
