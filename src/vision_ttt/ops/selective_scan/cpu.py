"""selective_scan on a CPU: the compiled kernels in csrc/scans/selective_scan."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from vision_ttt.ops import _native
from vision_ttt.ops._native import contiguous_last, mirrors, pointer, run_kernel
from vision_ttt.ops._op import Backend
from vision_ttt.ops.selective_scan.contract import Inputs, num_chunks, num_groups, parts

DTYPES = (torch.float32, torch.bfloat16)
"""The dtypes of u, delta, B, C and z that the kernels support."""


@mirrors("ScanTensor")
class _ScanTensor(ctypes.Structure):
    _fields_ = (("data", c_void_p), *((name, c_int64) for name in ("batch", "token", "group")))


@mirrors("SelectiveScan")
class _SelectiveScan(ctypes.Structure):
    _fields_ = (
        *((name, _ScanTensor) for name in ("u", "delta", "b", "c", "z", "y")),
        *((name, c_void_p) for name in ("a", "skip", "delta_bias", "initial_state")),
        *((name, c_void_p) for name in ("last_state", "kept_states")),
        *((name, c_int64) for name in ("batch", "length", "channels", "states", "groups")),
        *((name, c_int64) for name in ("reverse_channels", "delta_softplus", "is_bfloat16")),
        ("threads", c_int64),
    )


@mirrors("SelectiveScanGradients")
class _SelectiveScanGradients(ctypes.Structure):
    _fields_ = tuple(
        (name, c_void_p)
        for name in ("u", "delta", "z", "a", "b", "c", "skip", "delta_bias", "initial_state")
    )


def refusal(inputs: Inputs) -> str | None:
    """The reason why the kernels do not support the inputs, or None if they do."""
    channels, groups = inputs.u.shape[2], num_groups(inputs.B)
    for part in parts(channels, groups, inputs.reverse_channels):
        of_group = (part.channels.stop - part.channels.start) // (
            part.groups.stop - part.groups.start
        )
        reason = _native.no_vectors(of_group)
        if reason is not None:
            return reason
    return _native.refusal(inputs.u, dtypes=DTYPES)


def _prepared(inputs: Inputs) -> Inputs:
    """The inputs in the dtypes and strides that the kernels read."""
    u, delta, a, b, c, skip, z, bias, initial, *options = inputs
    u, delta, b, c, z = (None if x is None else contiguous_last(x) for x in (u, delta, b, c, z))
    a, skip, bias, initial = (
        None if x is None else x.float().contiguous() for x in (a, skip, bias, initial)
    )
    return Inputs(u, delta, a, b, c, skip, z, bias, initial, *options)


def _scan_tensor(x: Tensor | None) -> tuple[int | None, int, int, int]:
    """The fields of a :class:`_ScanTensor`, which ctypes converts to one."""
    if x is None:
        return None, 0, 0, 0
    return x.data_ptr(), *x.stride()[:2], x.stride(2) if x.ndim == 4 else 0


def _problem(inputs: Inputs, y: Tensor, state: Tensor, kept: Tensor | None) -> _SelectiveScan:
    """A call on prepared inputs."""
    u, delta, a, b, c, skip, z, bias, initial, softplus, reverse_channels = inputs
    return _SelectiveScan(
        *map(_scan_tensor, (u, delta, b, c, z, y)),
        *map(pointer, (a, skip, bias, initial, state, kept)),
        *(*u.shape, b.shape[-1], num_groups(b)),
        *(reverse_channels, softplus, u.dtype == torch.bfloat16, torch.get_num_threads()),
    )


def _forward(inputs: Inputs, save_states: bool) -> tuple[Tensor, Tensor, Tensor]:
    inputs = _prepared(inputs)
    u = inputs.u
    state = u.new_empty(u.shape[0], *inputs.A.shape, dtype=torch.float32)
    count = num_chunks(u.shape[1]) if save_states else 0
    y, kept = u.new_empty(u.shape), state.new_empty(count, *state.shape)
    problem = _problem(inputs, y, state, kept if save_states else None)
    run_kernel("vision_ttt_selective_scan", problem)
    return y, state, kept


def _backward(
    inputs: Inputs, grad_y: Tensor, grad_state: Tensor, kept: Tensor
) -> tuple[Tensor, ...]:
    given, inputs = inputs[:9], _prepared(inputs)
    grad_y = contiguous_last(grad_y.to(inputs.u.dtype))
    grad_state, kept = grad_state.float().contiguous(), kept.float().contiguous()
    problem = _problem(inputs, grad_y, grad_state, kept)
    u, state, channels = inputs.u, kept.shape[1:], inputs.u.shape[2]
    tokens = [u.new_empty(u.shape), u.new_empty(u.shape)]
    dz = u.new_empty(u.shape if inputs.z is not None else 0)
    # Of bfloat16 B and C, too, the gradients are summed in float32.
    of_matrices = [inputs.A.shape, inputs.B.shape, inputs.C.shape, (channels,), (channels,), state]
    sums = [u.new_empty(shape, dtype=torch.float32) for shape in of_matrices]
    gradients = _SelectiveScanGradients(*(x.data_ptr() for x in (*tokens, dz, *sums)))
    run_kernel("vision_ttt_selective_scan_backward", problem, gradients)
    found = (*tokens, *sums[:4], dz, *sums[4:])
    return tuple(
        u.new_empty(0) if like is None else x.to(like.dtype)
        for x, like in zip(found, given, strict=True)
    )


BACKEND = Backend(_forward, _backward, refusal)
