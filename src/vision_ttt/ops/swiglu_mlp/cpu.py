"""swiglu_mlp on a CPU: the compiled kernels in csrc/swiglu_mlp."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from vision_ttt.ops import _native
from vision_ttt.ops._native import mirrors, run_kernel
from vision_ttt.ops._op import Backend
from vision_ttt.ops.swiglu_mlp.contract import Inputs


@mirrors("SwiGluMlpProblem")
class _Problem(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "up", "down", "grad", "out", "dx", "dup", "ddown")),
        *((name, c_int64) for name in ("rows", "dim", "hidden", "columns", "threads")),
    )


def refusal(inputs: Inputs) -> str | None:
    """The reason why the kernels do not support the inputs, or None if they do."""
    (columns, hidden), dim = inputs.down.shape, inputs.x.shape[-1]
    unsuited = (_native.no_vectors(size) for size in (dim, hidden, columns))
    return next(filter(None, unsuited), None) or _native.refusal(inputs.x)


def _solve(kernel: str, inputs: Inputs, grad: Tensor | None, *results: Tensor | None) -> None:
    """Run a kernel on contiguous tensors."""
    x, up, down = inputs
    tensors = (x, up, down, grad, *results)
    columns, hidden = down.shape
    problem = _Problem(
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
        *(x.numel() // x.shape[-1], x.shape[-1], hidden, columns, torch.get_num_threads()),
    )
    run_kernel(kernel, problem)


def _forward(inputs: Inputs) -> Tensor:
    inputs = Inputs(*(tensor.contiguous() for tensor in inputs))
    out = inputs.x.new_empty(*inputs.x.shape[:-1], inputs.down.shape[0])
    _solve("vision_ttt_swiglu_mlp", inputs, None, out, None, None, None)
    return out


def _backward(inputs: Inputs, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    inputs = Inputs(*(tensor.contiguous() for tensor in inputs))
    dx, dup, ddown = (torch.empty_like(tensor) for tensor in inputs)
    grad = grad.to(dx.dtype).contiguous()
    _solve("vision_ttt_swiglu_mlp_backward", inputs, grad, None, dx, dup, ddown)
    return dx, dup, ddown


BACKEND = Backend(_forward, _backward, refusal)
