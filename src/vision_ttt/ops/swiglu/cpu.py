"""The custom op ``vision_ttt::swiglu`` on csrc/fused's CPU kernels."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from vision_ttt.ops._native import LANES, are_servable, call_kernel, require_servable
from vision_ttt.ops._second_derivative import derive_twice
from vision_ttt.ops.swiglu.contract import BACKWARD_CONTRACT, CONTRACT, IN_PLACE_CONTRACT
from vision_ttt.ops.swiglu.reference import swiglu_reference


class _SwiGlu(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "out", "dx")),
        *((name, c_int64) for name in ("rows", "hidden", "x_row", "out_row", "threads")),
    )


def fits(x: Tensor) -> bool:
    """Whether both halves are whole vectors."""
    return x.shape[-1] % (2 * LANES) == 0


def _problem(x: Tensor, out: Tensor, dx: Tensor | None) -> _SwiGlu:
    pointers = (x.data_ptr(), out.data_ptr(), None if dx is None else dx.data_ptr())
    width = x.shape[-1]
    rows = x.numel() // width
    return _SwiGlu(*pointers, rows, width // 2, width, out.shape[-1], torch.get_num_threads())


@torch.library.custom_op("vision_ttt::swiglu", mutates_args=())
@CONTRACT.guards
def swiglu_op(x: torch.Tensor) -> torch.Tensor:
    """See :func:`vision_ttt.ops.swiglu.swiglu`."""
    if not fits(x) or not are_servable(x):
        return swiglu_reference(x)
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    call_kernel("vision_ttt_swiglu", _problem(x, out, None))
    return out


@torch.library.custom_op("vision_ttt::swiglu_", mutates_args=("x",))
@IN_PLACE_CONTRACT.guards
def swiglu_in_place_op(x: torch.Tensor) -> None:
    """Write the result over the first half of x, contiguous."""
    require_servable(IN_PLACE_CONTRACT.op, fits(x), x)
    call_kernel("vision_ttt_swiglu", _problem(x, x, None))


@torch.library.custom_op("vision_ttt::swiglu_backward", mutates_args=())
@BACKWARD_CONTRACT.guards
def swiglu_backward_op(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of x [..., 2 H], given that of the output."""
    require_servable(BACKWARD_CONTRACT.op, fits(x), grad, x)
    x, grad = x.contiguous(), grad.contiguous()
    dx = torch.empty_like(x)
    call_kernel("vision_ttt_swiglu_backward", _problem(x, grad, dx))
    return dx


@swiglu_op.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@swiglu_in_place_op.register_fake
def _(x: Tensor) -> None:
    return None


@swiglu_backward_op.register_fake
def _(grad: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    return swiglu_backward_op(grad, *ctx.saved_tensors)


swiglu_op.register_autograd(_backward, setup_context=_setup_context)
derive_twice(swiglu_backward_op, swiglu_reference, tensors=1)
