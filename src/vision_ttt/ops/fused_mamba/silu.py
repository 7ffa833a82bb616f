"""SiLU and its derivative for fused_mamba, with the same bits for every number of threads."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from vision_ttt.ops._native import call_kernel, mirrors


@mirrors("Silu")
class _Silu(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "grad", "out")),
        *((name, c_int64) for name in ("count", "threads")),
    )


def silu(x: Tensor) -> Tensor:
    """SiLU(x) of a contiguous float32 x of a multiple of 16 numbers."""
    out = torch.empty_like(x)
    problem = _Silu(x.data_ptr(), None, out.data_ptr(), x.numel(), torch.get_num_threads())
    call_kernel("vision_ttt_silu", problem)
    return out


def silu_backward(x: Tensor, grad: Tensor) -> Tensor:
    """grad · SiLU'(x), of tensors as :func:`silu` takes them."""
    out = torch.empty_like(x)
    pointers = (tensor.data_ptr() for tensor in (x, grad, out))
    call_kernel("vision_ttt_silu", _Silu(*pointers, x.numel(), torch.get_num_threads()))
    return out
