"""TTT-Linear on a GPU: the supported inputs and the launches of both passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vision_ttt.ops import _learner_triton
from vision_ttt.ops._learner_dual import num_checkpoints, summed
from vision_ttt.ops._learner_triton import LearnerCall, of_positions
from vision_ttt.ops._native import contiguous_last
from vision_ttt.ops._op import Backend
from vision_ttt.ops.ttt_linear.contract import Inputs

UNNORMED = (16, 32)
"""Head dimensions that the kernels support without an inner norm. For larger ones ptxas 12.8, which
comes with Triton 3.6, compiles the backward pass wrongly; see this folder's README."""


def refusal(inputs: Inputs) -> str | None:
    """The reason why the kernels do not support the inputs, or None if they do."""
    dim = inputs.q.shape[-1]
    if inputs.ln_weight is None and dim not in UNNORMED:
        return f"without a norm, head dimension {dim} is not one of {UNNORMED}"
    return _learner_triton.refusal(inputs)


def ttt_linear_triton(
    inputs: Inputs, save_states: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Forward pass. Arguments and results are those of :func:`learner_dual`."""
    from vision_ttt.ops.ttt_linear import triton_forward

    q, mini_batch_size = inputs.q, inputs.mini_batch_size
    call = LearnerCall(inputs)
    batch, length, heads, dim = q.shape
    count = num_checkpoints(length, dim, mini_batch_size) if save_states else 0
    o = call.empty(*q.shape, dtype=q.dtype)
    w, b = call.states(batch, heads)
    kept_w, kept_b = call.states(count, batch, heads)
    with torch.cuda.device_of(q):
        triton_forward.forward.launch(
            call.programs,
            *(*call.views, *call.others, o, w, b),
            *((kept_w, kept_b) if count else (None, None)),
            *(*call.strides, call.state_batch, call.scale_head, *call.sizes, inputs.eps),
            **call.kind,
        )
    return o, w, b, kept_w, kept_b


def ttt_linear_triton_backward(
    inputs: Inputs, grad_o: Tensor, grad_w: Tensor, grad_b: Tensor, kept_w: Tensor, kept_b: Tensor
) -> tuple[Tensor, ...]:
    """Backward pass. Arguments and results are those of :func:`learner_dual_backward`."""
    from vision_ttt.ops.ttt_linear import triton_scan, triton_segments

    q, ln_weight, position_scale = inputs.q, inputs.ln_weight, inputs.position_scale
    mini_batch_size = inputs.mini_batch_size
    call = LearnerCall(inputs)
    batch, length, heads, dim = q.shape
    segments = num_checkpoints(length, dim, mini_batch_size) + 1
    grad_o = contiguous_last(grad_o.to(q.dtype))
    grad_w, grad_b, kept_w, kept_b = (
        x.float().contiguous() for x in (grad_w, grad_b, kept_w, kept_b)
    )
    dq, dk, dv = (call.empty(*q.shape, dtype=q.dtype) for _ in range(3))
    dw0, db0 = call.states(batch, heads)
    deta = call.empty(batch, length, heads)

    # Tensors from the first kernel to the second. The shares of ∂K and ∂G use the memory of the
    # results, unless their dtype differs: float16 has too small a range for them, and bfloat16
    # without a norm too few digits.
    dtype = q.dtype if q.dtype == torch.bfloat16 and ln_weight is not None else torch.float32
    dk_share, dg_share = dk, dv
    if dtype != q.dtype:
        dk_share, dg_share = (call.empty(*q.shape, dtype=dtype) for _ in range(2))
    dz_q, x = (call.empty(*q.shape, dtype=dtype) for _ in range(2))
    norm = None if ln_weight is None else call.empty(batch, length, heads, 2)
    w_end = call.empty(batch, heads, dim, dim)
    between = (dk_share, dg_share, dz_q, x, norm, w_end)
    w_before = call.empty(segments, *w_end.shape) if call.kind["SEVERAL"] else None

    # Every program writes its own share of ∂γ and ∂β; the last B rows are the second kernel's.
    # Every token writes its own share of ∂p; the state adds one for the last token of a mini-batch.
    # PyTorch sums the shares in a fixed order.
    dweight = dbias = dscale = dlast = None
    of_segments = of_scan = (None, None)
    if ln_weight is not None:
        dweight, dbias = (call.empty((segments + 1) * batch, heads, dim) for _ in range(2))
        of_segments = dweight[: segments * batch], dbias[: segments * batch]
        of_scan = dweight[-batch:], dbias[-batch:]
    if position_scale is not None:
        dscale = call.empty(batch, length, heads)
        dlast = call.empty(batch, heads, -(-length // mini_batch_size))
    eta_float, _, _, weight, bias, scale = call.others
    with torch.cuda.device_of(q):
        triton_segments.segments.launch(
            segments * call.programs,
            *(*call.views, *call.others, grad_o, kept_w, kept_b, dq, *between, w_before),
            *(*of_segments, dscale),
            *(*call.strides, grad_o.stride()[:3], call.state_batch, call.scale_head),
            *(*call.sizes, call.programs, inputs.eps),
            **call.kind,
        )
        triton_scan.scan.launch(
            call.programs,
            *(*call.views, eta_float, weight, bias, scale, grad_w, grad_b, kept_w, *between),
            *(dk, dv, deta, dw0, db0, *of_scan, dlast),
            *(*call.strides, call.scale_head, *call.sizes),
            **call.kind,
        )

    if dscale is not None:
        dscale = of_positions(dscale, dlast, mini_batch_size, inputs.reverse_heads)
    per_head = (None if x is None else x.sum(0) for x in (dweight, dbias, dscale))
    others = (deta, dw0, db0, *per_head)
    return dq, dk, dv, *(summed(x, like, q) for x, like in zip(others, inputs[3:-3], strict=True))


def launch_part(call: LearnerCall, *arguments: Any) -> None:
    """Run the kernel for a part of a mini-batch."""
    from vision_ttt.ops.ttt_linear.triton_part import part_kernel
    from vision_ttt.ops.ttt_linear.triton_tuning import ROWS

    constants = {name: x for name, x in call.kind.items() if name != "SEVERAL"}
    if call.programs:
        warps = ROWS[constants["DIM"]]
        part_kernel[(call.programs,)](*arguments, **constants, num_warps=warps, num_stages=1)


BACKEND = Backend(ttt_linear_triton, ttt_linear_triton_backward, refusal)
