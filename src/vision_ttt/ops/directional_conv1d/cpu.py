"""The custom op ``vision_ttt::directional_conv1d`` on csrc/fused's CPU kernels."""

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
    SequencePointer,
    are_servable,
    call_kernel,
    contiguous_last,
    require_servable,
)
from vision_ttt.ops._second_derivative import derive_twice
from vision_ttt.ops.directional_conv1d.contract import BACKWARD_CONTRACT, CONTRACT
from vision_ttt.ops.directional_conv1d.reference import directional_conv1d_reference


class _Conv1d(ctypes.Structure):
    _fields_ = (
        ("x", SequencePointer),
        ("y", SequencePointer),
        ("weight", c_void_p),
        ("bias", c_void_p),
        *((name, c_int64) for name in ("batch", "length", "channels", "taps")),
        *((name, c_int64) for name in ("reverse_channels", "threads")),
    )


class _Conv1dWeights(ctypes.Structure):
    _fields_ = (("weight", c_void_p), ("bias", c_void_p))


def fits(x: Tensor, reverse_channels: int) -> bool:
    """Whether channels of both directions are whole vectors."""
    return x.shape[-1] % LANES == 0 and reverse_channels % LANES == 0


def _problem(
    x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, reverse_channels: int
) -> _Conv1d:
    taps, channels = weight.shape
    return _Conv1d(
        SequencePointer.of(x),
        SequencePointer.of(y),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        *(*x.shape[:2], channels, taps, reverse_channels, torch.get_num_threads()),
    )


def directional_conv1d_backward(
    grad: Tensor, x: Tensor, weight: Tensor, reverse_channels: int, dx: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias; that of x is written to dx [B, T, C]."""
    x, grad = contiguous_last(x), contiguous_last(grad)
    taps = weight.squeeze(1).t().contiguous()  # [K, C]
    channels = taps.shape[1]
    # The derivative looks ahead where the convolution looks back. The kernel has the reverse
    # channels last, so each direction is a call of its own.
    forward = channels - reverse_channels
    for part, reverse in ((slice(0, forward), True), (slice(forward, None), False)):
        own = taps[:, part].contiguous()
        if own.numel():
            problem = _problem(
                grad[..., part], dx[..., part], own, None, own.shape[1] if reverse else 0
            )
            call_kernel("vision_ttt_conv1d", problem)
    dtaps, dbias = torch.empty_like(taps), taps.new_empty(channels)
    shares = _Conv1dWeights(dtaps.data_ptr(), dbias.data_ptr())
    problem = _problem(x, grad, taps, None, reverse_channels)
    call_kernel("vision_ttt_conv1d_weights", problem, shares)
    return dtaps.t().contiguous().unsqueeze(1), dbias


@torch.library.custom_op("vision_ttt::directional_conv1d", mutates_args=())
@CONTRACT.guards
def directional_conv1d_op(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, reverse_channels: int
) -> torch.Tensor:
    """See :func:`vision_ttt.ops.directional_conv1d.directional_conv1d`."""
    if not fits(x, reverse_channels) or not are_servable(x, weight, bias):
        return directional_conv1d_reference(x, weight, bias, reverse_channels)
    x, bias = contiguous_last(x), bias.contiguous()
    taps = weight.squeeze(1).t().contiguous()  # [K, C]
    y = x.new_empty(x.shape)
    call_kernel("vision_ttt_conv1d", _problem(x, y, taps, bias, reverse_channels))
    return y


@torch.library.custom_op("vision_ttt::directional_conv1d_backward", mutates_args=())
@BACKWARD_CONTRACT.guards
def directional_conv1d_backward_op(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    reverse_channels: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, weight and bias."""
    require_servable(BACKWARD_CONTRACT.op, fits(x, reverse_channels), grad, x, weight, bias)
    dx = x.new_empty(x.shape)
    return dx, *directional_conv1d_backward(grad, x, weight, reverse_channels, dx)


@directional_conv1d_op.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, reverse_channels: int) -> Tensor:
    return x.new_empty(x.shape)


@directional_conv1d_backward_op.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, reverse_channels: int
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), bias.new_empty(bias.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.reverse_channels = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *directional_conv1d_backward_op(grad, *ctx.saved_tensors, ctx.reverse_channels), None


directional_conv1d_op.register_autograd(_backward, setup_context=_setup_context)
derive_twice(directional_conv1d_backward_op, directional_conv1d_reference, tensors=3)


@register_flop_formula(torch.ops.vision_ttt.directional_conv1d)
def directional_conv1d_flops(
    x_shape: Sequence[int], weight_shape: Sequence[int], *_: Any, **__: Any
) -> int:
    """K multiply-adds per token and channel."""
    batch, length, channels = x_shape
    return 2 * batch * length * channels * weight_shape[-1]


@register_flop_formula(torch.ops.vision_ttt.directional_conv1d_backward)
def directional_conv1d_backward_flops(
    grad_shape: Sequence[int],
    x_shape: Sequence[int],
    weight_shape: Sequence[int],
    *_: Any,
    **__: Any,
) -> int:
    """As many for x and for the weights each."""
    return 2 * directional_conv1d_flops(x_shape, weight_shape)
