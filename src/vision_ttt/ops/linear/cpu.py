"""linear on a CPU: the compiled kernels in csrc/products/linear."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from vision_ttt.ops import _native
from vision_ttt.ops._native import mirrors, pointer, run_kernel
from vision_ttt.ops._op import Backend
from vision_ttt.ops.linear.contract import Inputs


@mirrors("Linear")
class _Linear(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "weight", "bias", "grad", "out", "dx", "dweight")),
        *((name, c_int64) for name in ("rows", "inner", "columns", "threads")),
    )


def refusal(inputs: Inputs) -> str | None:
    """The reason why the kernels do not support the inputs, or None if they do."""
    columns, inner = inputs.weight.shape
    return _native.no_vectors(inner) or _native.no_vectors(columns) or _native.refusal(inputs.x)


def _solve(kernel: str, inputs: Inputs, grad: Tensor | None, *results: Tensor | None) -> None:
    """Run a kernel on contiguous tensors."""
    x, weight, _ = inputs
    columns, inner = weight.shape
    sizes = x.numel() // inner, inner, columns, torch.get_num_threads()
    run_kernel(kernel, _Linear.pack(*map(pointer, (*inputs, grad, *results)), *sizes))


def _contiguous(inputs: Inputs) -> Inputs:
    return Inputs(*(None if tensor is None else tensor.contiguous() for tensor in inputs))


def _forward(inputs: Inputs) -> Tensor:
    inputs = _contiguous(inputs)
    out = inputs.x.new_empty(*inputs.x.shape[:-1], inputs.weight.shape[0])
    _solve("vision_ttt_linear", inputs, None, out, None, None)
    return out


def _backward(inputs: Inputs, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    inputs = _contiguous(inputs)
    grad = grad.to(inputs.x.dtype).contiguous()
    dx, dweight = torch.empty_like(inputs.x), torch.empty_like(inputs.weight)
    _solve("vision_ttt_linear_backward", inputs, grad, None, dx, dweight)
    if inputs.bias is None:
        return dx, dweight, grad.new_empty(0)
    return dx, dweight, grad.reshape(-1, grad.shape[-1]).sum(0)


BACKEND = Backend(_forward, _backward, refusal)
