"""deformable_attention on a CPU: the compiled kernels in csrc/convolutions/deformable_attention."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from vision_ttt.ops import _native
from vision_ttt.ops._native import call_kernel, contiguous_last, mirrors
from vision_ttt.ops._op import Backend
from vision_ttt.ops.deformable_attention.contract import Inputs

DTYPES = (torch.float32, torch.bfloat16)
"""The dtypes of value that the kernels support."""
MOST_POINTS = 512
"""The largest number L · P of points per head, ``VISION_TTT_MOST_POINTS`` of the kernels."""
MOST_CELLS = 2**31
"""Numbers of cells from here on exceed the kernels' 32-bit indices."""
LONGEST_SIDE = 2**24
"""Heights and widths from here on are not exact in float32."""


@mirrors("DeformableAttention")
class _DeformableAttention(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("value", "locations", "weights", "out", "shapes")),
        *((name, c_int64) for name in ("value_batch", "value_token", "value_head")),
        *((name, c_int64) for name in ("out_batch", "out_query", "batch", "tokens", "queries")),
        *((name, c_int64) for name in ("heads", "dim", "levels", "points")),
        *((name, c_int64) for name in ("is_bfloat16", "threads")),
    )


@mirrors("DeformableAttentionGradients")
class _DeformableAttentionGradients(ctypes.Structure):
    _fields_ = tuple((name, c_void_p) for name in ("value", "locations", "weights"))


def refusal(inputs: Inputs) -> str | None:
    """The reason why the kernels do not support the inputs, or None if they do."""
    value, locations, _, shapes = inputs
    reason = _native.refusal(*inputs[:3], dtypes=DTYPES) or _native.no_vectors(value.shape[-1])
    if reason is not None:
        return reason
    points = locations.shape[3] * locations.shape[4]
    if points > MOST_POINTS:
        return f"{points} points per head are over {MOST_POINTS}"
    if value.shape[1] >= MOST_CELLS or max(shapes) >= LONGEST_SIDE:
        return f"{value.shape[1]} cells in maps of {list(shapes)} are too many"
    return None


def _prepared(inputs: Inputs) -> Inputs:
    """The inputs in the dtypes and strides that the kernels read."""
    value, locations, weights, shapes = inputs
    locations, weights = (x.float().contiguous() for x in (locations, weights))
    return Inputs(contiguous_last(value), locations, weights, shapes)


def _problem(inputs: Inputs, out: Tensor) -> tuple[_DeformableAttention, ctypes.Array]:
    """A call on prepared inputs, and the sizes that it points to."""
    value, locations, weights, shapes = inputs
    sizes = (c_int64 * len(shapes))(*shapes)
    problem = _DeformableAttention(
        *(x.data_ptr() for x in (value, locations, weights, out)),
        ctypes.addressof(sizes),
        *(*value.stride()[:3], *out.stride()[:2]),
        *(*value.shape[:2], locations.shape[1], *value.shape[2:], *locations.shape[3:5]),
        *(value.dtype == torch.bfloat16, torch.get_num_threads()),
    )
    return problem, sizes


def _forward(inputs: Inputs) -> Tensor:
    inputs = _prepared(inputs)
    value, queries = inputs.value, inputs.locations.shape[1]
    out = value.new_empty(value.shape[0], queries, value.shape[2] * value.shape[3])
    problem, _sizes = _problem(inputs, out)  # which live as long as the call
    call_kernel("vision_ttt_deformable_attention", problem)
    return out


def _backward(inputs: Inputs, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    given, inputs = inputs, _prepared(inputs)
    grad = contiguous_last(grad.to(inputs.value.dtype))
    problem, _sizes = _problem(inputs, grad)
    # Of a bfloat16 value, too, the gradient is summed in float32.
    gradients = [x.new_empty(x.shape, dtype=torch.float32) for x in inputs[:3]]
    pointers = _DeformableAttentionGradients(*(x.data_ptr() for x in gradients))
    call_kernel("vision_ttt_deformable_attention_backward", problem, pointers)
    value, locations, weights = (x.to(of.dtype) for x, of in zip(gradients, given[:3], strict=True))
    return value, locations, weights


BACKEND = Backend(_forward, _backward, refusal)
