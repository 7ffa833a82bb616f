"""swiglu on a CPU: the compiled kernels in csrc/pointwise."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from vision_ttt.ops import _native
from vision_ttt.ops._native import call_kernel, mirrors, pointer
from vision_ttt.ops._op import Backend
from vision_ttt.ops.swiglu.contract import Inputs


@mirrors("SwiGlu")
class _SwiGlu(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "out", "dx")),
        *((name, c_int64) for name in ("rows", "hidden", "threads")),
    )


def refusal(inputs: Inputs) -> str | None:
    """The reason why the kernels do not support the inputs, or None if they do."""
    return _native.no_vectors(inputs.x.shape[-1] // 2) or _native.refusal(inputs.x)


def _problem(x: Tensor, out: Tensor, dx: Tensor | None) -> bytes:
    width = x.shape[-1]
    return _SwiGlu.pack(
        *(x.data_ptr(), out.data_ptr(), pointer(dx)),
        *(x.numel() // width, width // 2, torch.get_num_threads()),
    )


def _forward(inputs: Inputs) -> Tensor:
    x = inputs.x.contiguous()
    out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    call_kernel("vision_ttt_swiglu", _problem(x, out, None))
    return out


def _backward(inputs: Inputs, grad: Tensor) -> Tensor:
    x, grad = inputs.x.contiguous(), grad.to(inputs.x.dtype).contiguous()
    dx = torch.empty_like(x)
    call_kernel("vision_ttt_swiglu_backward", _problem(x, grad, dx))
    return dx


BACKEND = Backend(_forward, _backward, refusal)
