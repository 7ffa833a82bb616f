"""residual_conv2d_norm on a CPU: the compiled kernels in csrc/conv2d."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_void_p

import torch
from torch import Tensor

from vision_ttt.ops import _native
from vision_ttt.ops._native import mirrors, pointer, run_kernel
from vision_ttt.ops._op import Backend
from vision_ttt.ops.depthwise_conv2d.cpu import Conv2d, describe, of_taps
from vision_ttt.ops.residual_conv2d_norm.contract import Inputs


@mirrors("Conv2dNorm")
class _Conv2dNorm(ctypes.Structure):
    _fields_ = (
        ("conv", Conv2d),
        *((name, c_void_p) for name in ("weight", "bias", "normed", "dy", "dnormed")),
        *((name, c_void_p) for name in ("dtaps", "dweight", "dbias")),
        ("eps", c_float),
    )


def refusal(inputs: Inputs) -> str | None:
    """The reason why the kernels do not support the inputs, or None if they do."""
    return _native.no_vectors(inputs.x.shape[-1]) or _native.refusal(*inputs[:4])


def _contiguous(inputs: Inputs) -> Inputs:
    return Inputs(*(tensor.contiguous() for tensor in inputs[:4]), *inputs[4:])


def _run(kernel: str, inputs: Inputs, y: Tensor, *tensors: Tensor | None) -> None:
    """Run a kernel on contiguous tensors: the norm's result, then the gradients."""
    conv = describe(inputs.x, y, inputs.weight, inputs.weight.shape[-1], inputs.grid, residual=True)
    pointers = map(pointer, (inputs.norm_weight, inputs.norm_bias, *tensors))
    run_kernel(kernel, _Conv2dNorm.pack(*conv, *pointers, inputs.eps))


def _forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    inputs = _contiguous(inputs)
    y, normed = torch.empty_like(inputs.x), torch.empty_like(inputs.x)
    _run("vision_ttt_conv2d_norm", inputs, y, normed, *[None] * 5)
    return y, normed


def _backward(inputs: Inputs, grad_y: Tensor, grad_normed: Tensor) -> tuple[Tensor, ...]:
    inputs = _contiguous(inputs)
    x, weight = inputs.x, inputs.weight
    grad_y, grad_normed = (grad.to(x.dtype).contiguous() for grad in (grad_y, grad_normed))
    dx, taps = torch.empty_like(x), x.new_empty(weight.shape[-1] ** 2, x.shape[-1])
    dweight, dbias = torch.empty_like(inputs.norm_weight), torch.empty_like(inputs.norm_bias)
    incoming = None, grad_y, grad_normed
    _run("vision_ttt_conv2d_norm_backward", inputs, dx, *incoming, taps, dweight, dbias)
    return dx, of_taps(taps), dweight, dbias


BACKEND = Backend(_forward, _backward, refusal)
