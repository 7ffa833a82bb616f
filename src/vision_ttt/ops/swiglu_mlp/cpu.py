"""swiglu_mlp on a CPU: the compiled kernels in csrc/swiglu_mlp."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from vision_ttt.ops import _native
from vision_ttt.ops._native import mirrors, run_kernel
from vision_ttt.ops._op import Backend
from vision_ttt.ops.swiglu_mlp.contract import Inputs


@mirrors("SwiGluMlpProblem")
class _Problem(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "up", "down", "grad", "norm_weight", "norm_bias")),
        *((name, c_void_p) for name in ("out", "kept", "dx", "dup", "ddown")),
        *((name, c_void_p) for name in ("dnorm_weight", "dnorm_bias")),
        *((name, c_int64) for name in ("rows", "dim", "hidden", "columns", "kept_units")),
        *((name, c_int64) for name in ("adds", "threads")),
        ("eps", c_float),
    )


class Norm(NamedTuple):
    """The norm of the input, and whether the input is added to the result."""

    weight: Tensor
    bias: Tensor
    eps: float
    residual: bool


def refusal(inputs: Inputs) -> str | None:
    """The reason why the kernels do not support the inputs, or None if they do."""
    (columns, hidden), dim = inputs.down.shape, inputs.x.shape[-1]
    unsuited = (_native.no_vectors(size) for size in (dim, hidden, columns))
    return next(filter(None, unsuited), None) or _native.refusal(inputs.x)


def describe(
    inputs: Inputs,
    norm: Norm | None = None,
    *,
    grad: Tensor | None = None,
    out: Tensor | None = None,
    kept: Tensor | None = None,
    gradients: Sequence[Tensor] = (),
) -> _Problem:
    """Describe a call on contiguous tensors; ``gradients`` are of x, up, down and the norm."""
    (columns, hidden), rows = inputs.down.shape, inputs.x.numel() // inputs.x.shape[-1]
    tensors = (*inputs, grad, *((None, None) if norm is None else norm[:2]), out, kept, *gradients)
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    return _Problem(
        *(*pointers, *[None] * (13 - len(pointers))),
        *(rows, inputs.x.shape[-1], hidden, columns, 0 if kept is None else kept.shape[1] // 2),
        norm is not None and norm.residual,
        *(torch.get_num_threads(), 0.0 if norm is None else norm.eps),
    )


def _forward(inputs: Inputs) -> Tensor:
    inputs = Inputs(*(tensor.contiguous() for tensor in inputs))
    out = inputs.x.new_empty(*inputs.x.shape[:-1], inputs.down.shape[0])
    run_kernel("vision_ttt_swiglu_mlp", describe(inputs, out=out))
    return out


def _backward(inputs: Inputs, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    inputs = Inputs(*(tensor.contiguous() for tensor in inputs))
    gradients = tuple(torch.empty_like(tensor) for tensor in inputs)
    grad = grad.to(inputs.x.dtype).contiguous()
    run_kernel("vision_ttt_swiglu_mlp_backward", describe(inputs, grad=grad, gradients=gradients))
    return gradients


BACKEND = Backend(_forward, _backward, refusal)
