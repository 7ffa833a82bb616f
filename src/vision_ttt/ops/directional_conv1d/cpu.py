"""directional_conv1d on a CPU: the compiled kernels in csrc/convolutions/conv1d."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from vision_ttt.ops import _native
from vision_ttt.ops._native import (
    SequencePointer,
    call_kernel,
    contiguous_last,
    mirrors,
    pointer,
    run_kernel,
    sequence,
)
from vision_ttt.ops._op import Backend
from vision_ttt.ops.directional_conv1d.contract import Inputs


@mirrors("Conv1d")
class _Conv1d(ctypes.Structure):
    _fields_ = (
        ("x", SequencePointer),
        ("y", SequencePointer),
        ("weight", c_void_p),
        ("bias", c_void_p),
        *((name, c_int64) for name in ("batch", "length", "channels", "taps")),
        *((name, c_int64) for name in ("reverse_channels", "threads")),
    )


@mirrors("Conv1dWeights")
class _Conv1dWeights(ctypes.Structure):
    _fields_ = (("weight", c_void_p), ("bias", c_void_p))


def refusal(inputs: Inputs) -> str | None:
    """The reason why the kernels do not support the inputs, or None if they do."""
    x, weight, bias, reverse_channels = inputs
    return (
        _native.no_vectors(x.shape[-1])
        or _native.no_vectors(reverse_channels)
        or _native.refusal(x, weight, bias)
    )


def _problem(
    x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, reverse_channels: int
) -> bytes:
    batch, length, channels = x.shape
    sizes = batch, length, channels, weight.shape[-1], reverse_channels, torch.get_num_threads()
    return _Conv1d.pack(*sequence(x), *sequence(y), weight.data_ptr(), pointer(bias), *sizes)


def _forward(inputs: Inputs) -> Tensor:
    x, weight, bias, reverse_channels = inputs
    x, weight, bias = contiguous_last(x), weight.contiguous(), bias.contiguous()
    y = x.new_empty(x.shape)
    run_kernel("vision_ttt_conv1d", _problem(x, y, weight, bias, reverse_channels))
    return y


def directional_conv1d_backward(inputs: Inputs, grad: Tensor, dx: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of weight and bias; write the gradient of x to dx [B, T, C]."""
    x, grad = contiguous_last(inputs.x), contiguous_last(grad.to(inputs.x.dtype))
    weight = inputs.weight.contiguous()
    channels, _, size = weight.shape
    # The derivative of a causal convolution is anti-causal. The kernel expects the reverse channels
    # last, so each direction needs a call of its own.
    forward = channels - inputs.reverse_channels
    for part, reverse in ((slice(0, forward), True), (slice(forward, None), False)):
        own = weight[part]
        if own.numel():
            problem = _problem(
                grad[..., part], dx[..., part], own, None, len(own) if reverse else 0
            )
            run_kernel("vision_ttt_conv1d", problem)
    dtaps, dbias = weight.new_empty(size, channels), weight.new_empty(channels)
    shares = _Conv1dWeights.pack(dtaps.data_ptr(), dbias.data_ptr())
    problem = _problem(x, grad, weight, None, inputs.reverse_channels)
    call_kernel("vision_ttt_conv1d_weights", problem, shares)
    return dtaps.t().contiguous().unsqueeze(1), dbias


def _backward(inputs: Inputs, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dx = inputs.x.new_empty(inputs.x.shape)
    return dx, *directional_conv1d_backward(inputs, grad, dx)


BACKEND = Backend(_forward, _backward, refusal)
