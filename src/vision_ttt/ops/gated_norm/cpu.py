"""gated_norm on a CPU: the compiled kernels in csrc/pointwise."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p

import torch
from torch import Tensor

from vision_ttt.ops import _native
from vision_ttt.ops._native import (
    LIBRARY,
    SequencePointer,
    call_kernel,
    contiguous_last,
    mirrors,
    sequence,
)
from vision_ttt.ops._op import Backend
from vision_ttt.ops.gated_norm.contract import Inputs

MOST_DIRECTIONS = 2
"""The largest number R of directions that the kernels support."""


@mirrors("GatedNorm")
class _GatedNorm(ctypes.Structure):
    _fields_ = (
        *((name, SequencePointer) for name in ("z", "gate", "out")),
        ("weight", c_void_p),
        ("bias", c_void_p),
        *((name, c_int64) for name in ("batch", "length", "dim", "parts", "threads")),
        ("eps", c_float),
    )


@mirrors("GatedNormGradients")
class _GatedNormGradients(ctypes.Structure):
    _fields_ = (
        ("z", SequencePointer),
        ("gate", SequencePointer),
        ("weight", c_void_p),
        ("bias", c_void_p),
    )


def refusal(inputs: Inputs) -> str | None:
    """The reason why the kernels do not support the inputs, or None if they do."""
    parts, dim = inputs.weight.shape
    if parts > MOST_DIRECTIONS:
        return f"{parts} directions are over {MOST_DIRECTIONS}"
    return _native.no_vectors(dim) or _native.refusal(*inputs[:4])


def _prepared(inputs: Inputs) -> Inputs:
    """The inputs in the strides that the kernels read."""
    z, gate, weight, bias, eps = inputs
    gate = None if gate is None else contiguous_last(gate)
    return Inputs(contiguous_last(z), gate, weight.contiguous(), bias.contiguous(), eps)


def _problem(inputs: Inputs, out: Tensor) -> bytes:
    z, gate, weight, bias, eps = inputs
    parts, dim = weight.shape
    return _GatedNorm.pack(
        *(*sequence(z), *sequence(gate), *sequence(out)),
        *(weight.data_ptr(), bias.data_ptr()),
        *(*z.shape[:2], dim, parts, torch.get_num_threads()),
        eps,
    )


def gated_norm_forward(inputs: Inputs) -> Tensor:
    """Return the op's result [B, T, D]."""
    inputs = _prepared(inputs)
    z = inputs.z
    out = z.new_empty(*z.shape[:2], inputs.weight.shape[1])
    call_kernel("vision_ttt_gated_norm", _problem(inputs, out))
    return out


def gated_norm_backward(
    inputs: Inputs, grad: Tensor, dgate: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of z, weight and bias; write the gate's to dgate [B, T, D]."""
    inputs = _prepared(inputs)
    z, weight = inputs.z, inputs.weight
    grad = contiguous_last(grad.to(z.dtype))
    dz = z.new_empty(z.shape)
    # Every chunk of tokens writes its own share, so the sum does not depend on the threads.
    chunks = z.shape[0] * -(-z.shape[1] // LIBRARY.vision_ttt_chunk_tokens())
    shares = z.new_empty(2, chunks, *weight.shape)
    gradients = _GatedNormGradients.pack(
        *(*sequence(dz), *sequence(dgate)),
        *(shares[0].data_ptr(), shares[1].data_ptr()),
    )
    call_kernel("vision_ttt_gated_norm_backward", _problem(inputs, grad), gradients)
    dweight, dbias = shares.sum(1).unbind()
    return dz, dweight.clone(), dbias.clone()


def _backward(inputs: Inputs, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gate = inputs.gate
    dgate = None if gate is None else gate.new_empty(gate.shape)
    dz, dweight, dbias = gated_norm_backward(inputs, grad, dgate)
    return dz, dz.new_empty(0) if dgate is None else dgate, dweight, dbias


BACKEND = Backend(gated_norm_forward, _backward, refusal)
