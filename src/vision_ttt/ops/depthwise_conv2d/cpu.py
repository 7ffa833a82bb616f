"""depthwise_conv2d on a CPU: the compiled kernels in csrc/convolutions/conv2d."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from vision_ttt.ops import _native
from vision_ttt.ops._native import (
    LIBRARY,
    SequencePointer,
    contiguous_last,
    mirrors,
    pointer,
    run_kernel,
    sequence,
)
from vision_ttt.ops._op import Backend
from vision_ttt.ops.depthwise_conv2d.contract import Inputs


@mirrors("Conv2d")
class _Conv2d(ctypes.Structure):
    _fields_ = (
        ("x", SequencePointer),
        ("y", SequencePointer),
        ("weight", c_void_p),
        *((name, c_int64) for name in ("batch", "height", "width")),
        *((name, c_int64) for name in ("channels", "kernel", "threads")),
    )


def refusal(inputs: Inputs) -> str | None:
    """The reason why the kernels do not support the inputs, or None if they do."""
    return _native.no_vectors(inputs.x.shape[-1]) or _native.refusal(inputs.x, inputs.weight)


def _problem(
    x: Tensor, y: Tensor, weight: Tensor | None, kernel: int, grid: Sequence[int]
) -> bytes:
    """A call on x and y [B, T, C]; the gradient of the weight needs no weight."""
    batch, _, channels = x.shape
    sizes = batch, *grid, channels, kernel, torch.get_num_threads()
    return _Conv2d.pack(*sequence(x), *sequence(y), pointer(weight), *sizes)


def correlate(x: Tensor, y: Tensor, kernel: int, grid: Sequence[int]) -> Tensor:
    """The gradient of the weight [C, 1, K, K], given the gradient y [B, T, C] of the output."""
    x, y = contiguous_last(x), contiguous_last(y)
    taps = x.new_empty(kernel * kernel, x.shape[-1])
    problem = _problem(x, y, None, kernel, grid)
    LIBRARY.vision_ttt_conv2d_weight(problem, c_void_p(taps.data_ptr()))
    return taps.t().contiguous().view(-1, 1, kernel, kernel)


def _forward(inputs: Inputs) -> Tensor:
    x, weight = contiguous_last(inputs.x), inputs.weight.contiguous()
    y = x.new_empty(x.shape)
    run_kernel("vision_ttt_conv2d", _problem(x, y, weight, weight.shape[-1], inputs.grid()))
    return y


def _backward(inputs: Inputs, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = inputs.x, inputs.weight
    grad = contiguous_last(grad.to(x.dtype))
    kernel = weight.shape[-1]
    # ∂x is the convolution of the gradient with the kernel mirrored in both axes.
    mirrored = weight.flip(-2, -1).contiguous()
    dx = x.new_empty(x.shape)
    run_kernel("vision_ttt_conv2d", _problem(grad, dx, mirrored, kernel, inputs.grid()))
    return dx, correlate(x, grad, kernel, inputs.grid())


BACKEND = Backend(_forward, _backward, refusal)
