"""The custom op ``vision_ttt::depthwise_conv2d`` on csrc/conv2d's CPU kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from vision_ttt.ops._native import (
    LANES,
    LIBRARY,
    SequencePointer,
    are_servable,
    call_kernel,
    contiguous_last,
    require_servable,
)
from vision_ttt.ops._second_derivative import derive_twice
from vision_ttt.ops.depthwise_conv2d.contract import BACKWARD_CONTRACT, CONTRACT
from vision_ttt.ops.depthwise_conv2d.reference import depthwise_conv2d_reference


class _Conv2d(ctypes.Structure):
    _fields_ = (
        ("x", SequencePointer),
        ("y", SequencePointer),
        ("weight", c_void_p),
        *((name, c_int64) for name in ("batch", "height", "width")),
        *((name, c_int64) for name in ("channels", "kernel", "threads", "residual")),
    )


def fits(x: Tensor) -> bool:
    """Whether the channels are whole vectors."""
    return x.shape[-1] % LANES == 0


def _taps(weight: Tensor) -> Tensor:
    """[C, 1, K, K] → [K · K, C]."""
    return weight.flatten(1).t().contiguous()


def conv2d_problem(
    x: Tensor, y: Tensor, taps: Tensor | None, kernel: int, grid: Sequence[int]
) -> _Conv2d:
    """A call of csrc/conv2d on x and y [B, T, C]; the weight's gradient needs no taps."""
    return _Conv2d(
        SequencePointer.of(x),
        SequencePointer.of(y),
        None if taps is None else taps.data_ptr(),
        *(x.shape[0], *grid, x.shape[-1], kernel, torch.get_num_threads(), 0),
    )


@torch.library.custom_op(
    "vision_ttt::depthwise_conv2d",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, SymInt height, SymInt width) -> Tensor",
)
@CONTRACT.guards
def depthwise_conv2d_op(x: Tensor, weight: Tensor, *grid: int) -> Tensor:
    """See :func:`vision_ttt.ops.depthwise_conv2d.depthwise_conv2d`."""
    if not fits(x) or not are_servable(x, weight):
        return depthwise_conv2d_reference(x, weight, *grid).contiguous()
    x, taps = contiguous_last(x), _taps(weight)
    y = x.new_empty(x.shape)
    call_kernel("vision_ttt_conv2d", conv2d_problem(x, y, taps, weight.shape[-1], grid))
    return y


@torch.library.custom_op(
    "vision_ttt::depthwise_conv2d_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor weight, SymInt height, SymInt width) "
    "-> (Tensor dx, Tensor dweight)",
)
@BACKWARD_CONTRACT.guards
def depthwise_conv2d_backward_op(
    grad: Tensor, x: Tensor, weight: Tensor, *grid: int
) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight."""
    require_servable(BACKWARD_CONTRACT.op, fits(x), grad, x, weight)
    x, grad = contiguous_last(x), contiguous_last(grad)
    kernel = weight.shape[-1]
    mirrored = _taps(weight).flip(0)  # what x gave to the right comes back from the right
    dx = x.new_empty(x.shape)
    call_kernel("vision_ttt_conv2d", conv2d_problem(grad, dx, mirrored, kernel, grid))
    dtaps = torch.empty_like(mirrored)
    problem = conv2d_problem(x, grad, None, kernel, grid)
    LIBRARY.vision_ttt_conv2d_weight(ctypes.byref(problem), c_void_p(dtaps.data_ptr()))
    return dx, dtaps.t().contiguous().view(weight.shape)


@depthwise_conv2d_op.register_fake
def _(x: Tensor, weight: Tensor, height: int, width: int) -> Tensor:
    torch._check(x.shape[1] == height * width, lambda: "the tokens do not fill the grid")
    return x.new_empty(x.shape)


@depthwise_conv2d_backward_op.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, *ctx.grid = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *depthwise_conv2d_backward_op(grad, *ctx.saved_tensors, *ctx.grid), None, None


depthwise_conv2d_op.register_autograd(_backward, setup_context=_setup_context)
derive_twice(depthwise_conv2d_backward_op, depthwise_conv2d_reference, tensors=2)


@register_flop_formula(torch.ops.vision_ttt.depthwise_conv2d)
def depthwise_conv2d_flops(
    x_shape: Sequence[int], weight_shape: Sequence[int], *_: Any, **__: Any
) -> int:
    """K² multiply-adds per token and channel."""
    batch, length, channels = x_shape
    return 2 * batch * length * channels * weight_shape[-1] ** 2


@register_flop_formula(torch.ops.vision_ttt.depthwise_conv2d_backward)
def depthwise_conv2d_backward_flops(
    grad_shape: Sequence[int],
    x_shape: Sequence[int],
    weight_shape: Sequence[int],
    *_: Any,
    **__: Any,
) -> int:
    """As many for x and for the weight each."""
    return 2 * depthwise_conv2d_flops(x_shape, weight_shape)
