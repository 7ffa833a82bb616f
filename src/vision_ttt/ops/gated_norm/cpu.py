"""The custom op ``vision_ttt::gated_norm`` on csrc/fused's CPU kernels."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from vision_ttt.ops._native import (
    LANES,
    LIBRARY,
    SequencePointer,
    are_servable,
    call_kernel,
    contiguous_last,
    require_servable,
)
from vision_ttt.ops._second_derivative import derive_twice
from vision_ttt.ops.gated_norm.contract import BACKWARD_CONTRACT, CONTRACT
from vision_ttt.ops.gated_norm.reference import gated_norm_reference


class _GatedNorm(ctypes.Structure):
    _fields_ = (
        *((name, SequencePointer) for name in ("z", "gate", "out")),
        ("weight", c_void_p),
        ("bias", c_void_p),
        *((name, c_int64) for name in ("batch", "length", "dim", "parts", "threads")),
        ("eps", c_float),
    )


class _GatedNormGradients(ctypes.Structure):
    _fields_ = (
        ("z", SequencePointer),
        ("gate", SequencePointer),
        ("weight", c_void_p),
        ("bias", c_void_p),
    )


def fits(weight: Tensor) -> bool:
    """Whether the kernel takes norms [R, D] of this shape."""
    parts, dim = weight.shape
    return parts <= 2 and dim % LANES == 0


def _problem(
    z: Tensor, gate: Tensor | None, out: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> _GatedNorm:
    parts, dim = weight.shape
    return _GatedNorm(
        *(SequencePointer.of(x) for x in (z, gate, out)),
        *(weight.data_ptr(), bias.data_ptr()),
        *(*z.shape[:2], dim, parts, torch.get_num_threads()),
        eps,
    )


def _prepared(
    z: Tensor, gate: Tensor | None, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    gate = None if gate is None else contiguous_last(gate)
    return contiguous_last(z), gate, weight.contiguous(), bias.contiguous()


def gated_norm_forward(
    z: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    out: Tensor | None = None,
) -> Tensor:
    """See :func:`vision_ttt.ops.gated_norm.gated_norm`; out [B, T, D] may be z's first columns."""
    z, gate, weight, bias = _prepared(z, gate, weight, bias)
    if out is None:
        out = z.new_empty(*z.shape[:2], weight.shape[1])
    call_kernel("vision_ttt_gated_norm", _problem(z, gate, out, weight, bias, eps))
    return out


def gated_norm_backward(
    grad: Tensor,
    inputs: tuple[Tensor, Tensor | None, Tensor, Tensor],
    eps: float,
    dgate: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of z, weight and bias; that of the gate is written to dgate [B, T, D]."""
    z, gate, weight, bias = _prepared(*inputs)
    grad = contiguous_last(grad)
    dz = z.new_empty(z.shape)
    # Each chunk of tokens writes a share of its own: the sum is the same whatever the threads.
    chunks = z.shape[0] * -(-z.shape[1] // LIBRARY.vision_ttt_chunk_tokens())
    shares = z.new_empty(2, chunks, *weight.shape)
    gradients = _GatedNormGradients(
        SequencePointer.of(dz),
        SequencePointer.of(dgate),
        *(shares[0].data_ptr(), shares[1].data_ptr()),
    )
    problem = _problem(z, gate, grad, weight, bias, eps)
    call_kernel("vision_ttt_gated_norm_backward", problem, gradients)
    dweight, dbias = shares.sum(1).unbind()
    return dz, dweight.clone(), dbias.clone()


@torch.library.custom_op(
    "vision_ttt::gated_norm",
    mutates_args=(),
    schema="(Tensor z, Tensor? gate, Tensor weight, Tensor bias, float eps) -> Tensor",
)
@CONTRACT.guards
def gated_norm_op(
    z: Tensor, gate: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    """See :func:`vision_ttt.ops.gated_norm.gated_norm`."""
    if not fits(weight) or not are_servable(z, weight, bias, *() if gate is None else (gate,)):
        return gated_norm_reference(z, gate, weight, bias, eps)
    return gated_norm_forward(z, gate, weight, bias, eps)


@torch.library.custom_op(
    "vision_ttt::gated_norm_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor z, Tensor? gate, Tensor weight, Tensor bias, float eps) "
    "-> (Tensor dz, Tensor dgate, Tensor dweight, Tensor dbias)",
)
@BACKWARD_CONTRACT.guards
def gated_norm_backward_op(
    grad: Tensor, z: Tensor, gate: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of all four tensors; that of a gate which is not there is empty."""
    tensors = (grad, z, weight, bias) if gate is None else (grad, z, weight, bias, gate)
    require_servable(BACKWARD_CONTRACT.op, fits(weight), *tensors)
    dgate = None if gate is None else gate.new_empty(gate.shape)
    dz, dweight, dbias = gated_norm_backward(grad, (z, gate, weight, bias), eps, dgate)
    return dz, z.new_empty(0) if dgate is None else dgate, dweight, dbias


@gated_norm_op.register_fake
def _(z: Tensor, gate: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return z.new_empty(*z.shape[:2], weight.shape[1])


@gated_norm_backward_op.register_fake
def _(
    grad: Tensor, z: Tensor, gate: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dgate = z.new_empty(0) if gate is None else gate.new_empty(gate.shape)
    return z.new_empty(z.shape), dgate, weight.new_empty(weight.shape), bias.new_empty(bias.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    dz, dgate, dweight, dbias = gated_norm_backward_op(grad, *saved, ctx.eps)
    return dz, None if saved[1] is None else dgate, dweight, dbias, None


gated_norm_op.register_autograd(_backward, setup_context=_setup_context)
derive_twice(gated_norm_backward_op, gated_norm_reference, tensors=4)
