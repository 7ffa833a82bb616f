"""fused_mamba on a CPU: the compiled kernels of its parts."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from vision_ttt.ops import _native
from vision_ttt.ops._native import call_kernel, mirrors, pointer
from vision_ttt.ops.directional_conv1d import cpu as convolution
from vision_ttt.ops.fused_mamba.contract import Inputs
from vision_ttt.ops.fused_mamba.recomputing import Parts, recomputing
from vision_ttt.ops.linear import cpu as product
from vision_ttt.ops.selective_scan import cpu as recurrence


@mirrors("Silu")
class _Silu(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "grad", "out")),
        *((name, c_int64) for name in ("count", "threads")),
    )


def _silu(x: Tensor, grad: Tensor | None = None) -> Tensor:
    """SiLU(x) of a contiguous float32 x of a multiple of 16 numbers, or grad · SiLU'(x).

    The bits are the same for every number of threads.
    """
    out = torch.empty_like(x)
    fields = x.data_ptr(), pointer(grad), out.data_ptr(), x.numel(), torch.get_num_threads()
    call_kernel("vision_ttt_silu", _Silu.pack(*fields))
    return out


def refusal(x: Inputs) -> str | None:
    """The reason why the kernels do not support the inputs, or None if they do."""
    return _native.no_vectors(x.inner()) or _native.refusal(*x)


BACKEND = recomputing(
    Parts(convolution.BACKEND, recurrence.BACKEND, product.BACKEND, _silu, _silu), refusal
)
