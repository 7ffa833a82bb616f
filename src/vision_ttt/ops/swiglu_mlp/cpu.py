"""swiglu_mlp on a CPU: the compiled kernels in csrc/blocks/swiglu_mlp."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p

import torch
from torch import Tensor

from vision_ttt.ops import _native
from vision_ttt.ops._native import mirrors, pointer, run_kernel
from vision_ttt.ops._op import Backend
from vision_ttt.ops.swiglu_mlp.contract import Inputs


@mirrors("SwiGluMlpProblem")
class _Problem(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "up", "down", "norm_weight", "norm_bias")),
        *((name, c_void_p) for name in ("grad", "out", "dx", "dup", "ddown")),
        *((name, c_void_p) for name in ("dnorm_weight", "dnorm_bias")),
        *((name, c_int64) for name in ("rows", "dim", "hidden", "columns", "adds", "threads")),
        ("eps", c_float),
    )


def refusal(inputs: Inputs) -> str | None:
    """The reason why the kernels do not support the inputs, or None if they do."""
    (columns, hidden), dim = inputs.down.shape, inputs.x.shape[-1]
    unsuited = (_native.no_vectors(size) for size in (dim, hidden, columns))
    tensors = (x for x in inputs[:5] if x is not None)
    return next(filter(None, unsuited), None) or _native.refusal(*tensors)


def _run(
    kernel: str,
    inputs: Inputs,
    grad: Tensor | None,
    out: Tensor | None,
    gradients: Sequence[Tensor | None] = (None,) * 5,
) -> None:
    """Run a kernel on contiguous tensors."""
    (columns, hidden), dim = inputs.down.shape, inputs.x.shape[-1]
    tensors = (*inputs[:5], grad, out, *gradients)
    sizes = inputs.x.numel() // dim, dim, hidden, columns, inputs.residual
    fields = (*map(pointer, tensors), *sizes, torch.get_num_threads(), inputs.eps)
    run_kernel(kernel, _Problem.pack(*fields))


def _contiguous(inputs: Inputs) -> Inputs:
    return Inputs(*(None if x is None else x.contiguous() for x in inputs[:5]), *inputs[5:])


def _forward(inputs: Inputs) -> Tensor:
    inputs = _contiguous(inputs)
    out = inputs.x.new_empty(*inputs.x.shape[:-1], inputs.down.shape[0])
    _run("vision_ttt_swiglu_mlp", inputs, None, out)
    return out


def _backward(inputs: Inputs, grad: Tensor) -> tuple[Tensor, ...]:
    inputs = _contiguous(inputs)
    gradients = [None if x is None else torch.empty_like(x) for x in inputs[:5]]
    grad = grad.to(inputs.x.dtype).contiguous()
    _run("vision_ttt_swiglu_mlp_backward", inputs, grad, None, gradients)
    return tuple(inputs.x.new_empty(0) if x is None else x for x in gradients)


BACKEND = Backend(_forward, _backward, refusal)
