"""The custom op ``vision_ttt::depthwise_correlation`` on csrc/conv2d's CPU kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_void_p
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from vision_ttt.ops._native import LIBRARY, are_servable, contiguous_last
from vision_ttt.ops.depthwise_conv2d.cpu import conv2d_problem, depthwise_conv2d_op, fits
from vision_ttt.ops.depthwise_correlation.contract import CONTRACT
from vision_ttt.ops.depthwise_correlation.reference import depthwise_correlation_reference


@torch.library.custom_op(
    "vision_ttt::depthwise_correlation",
    mutates_args=(),
    schema="(Tensor x, Tensor y, SymInt height, SymInt width, SymInt kernel_size) -> Tensor",
)
@CONTRACT.guards
def depthwise_correlation_op(
    x: Tensor, y: Tensor, height: int, width: int, kernel_size: int
) -> Tensor:
    """See :func:`vision_ttt.ops.depthwise_correlation.depthwise_correlation`."""
    if not fits(x) or not are_servable(x, y):
        return depthwise_correlation_reference(x, y, height, width, kernel_size)
    x, y = contiguous_last(x), contiguous_last(y)
    taps = x.new_empty(kernel_size * kernel_size, x.shape[-1])
    problem = conv2d_problem(x, y, None, kernel_size, (height, width))
    LIBRARY.vision_ttt_conv2d_weight(ctypes.byref(problem), c_void_p(taps.data_ptr()))
    return taps.t().contiguous().view(-1, 1, kernel_size, kernel_size)


@depthwise_correlation_op.register_fake
def _(x: Tensor, y: Tensor, height: int, width: int, kernel_size: int) -> Tensor:
    torch._check(x.shape[1] == height * width, lambda: "the tokens do not fill the grid")
    return x.new_empty(x.shape[-1], 1, kernel_size, kernel_size)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, y, *ctx.grid, _ = inputs
    ctx.save_for_backward(x, y)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    # The op is linear in x and in y, and both of its derivatives are convolutions.
    x, y = ctx.saved_tensors
    dx = depthwise_conv2d_op(y, grad.flip(-2, -1), *ctx.grid)
    dy = depthwise_conv2d_op(x, grad, *ctx.grid)
    return dx, dy, None, None, None


depthwise_correlation_op.register_autograd(_backward, setup_context=_setup_context)


@register_flop_formula(torch.ops.vision_ttt.depthwise_correlation)
def depthwise_correlation_flops(
    x_shape: Sequence[int],
    y_shape: Sequence[int],
    height: int,
    width: int,
    kernel_size: int,
    *_: Any,
    **__: Any,
) -> int:
    """K² multiply-adds per token and channel."""
    batch, length, channels = x_shape
    return 2 * batch * length * channels * kernel_size**2
