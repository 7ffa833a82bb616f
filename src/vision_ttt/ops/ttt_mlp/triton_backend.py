"""TTT-MLP on a GPU: the launches of both passes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vision_ttt.ops._learner_dual import num_checkpoints, summed
from vision_ttt.ops._learner_triton import TILE, LearnerCall, of_positions, refusal
from vision_ttt.ops._native import contiguous_last
from vision_ttt.ops._op import Backend
from vision_ttt.ops.ttt_mlp.contract import Inputs


class Layout(NamedTuple):
    """Hidden units of a block, and a program's warps."""

    block: int
    warps: int


LAYOUTS = {16: Layout(64, 2), 32: Layout(32, 4), 64: Layout(32, 8), 128: Layout(32, 8)}
"""Head dimension → the kernels' layout; see this folder's README."""


def _launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Run a kernel on a one-dimensional grid."""
    if programs:
        block, warps = LAYOUTS[constants["DIM"]]
        constants |= {"BLOCK": block, "num_warps": warps, "num_stages": 1}
        kernel[(programs,)](*arguments, **constants, enable_fp_fusion=True)


def ttt_mlp_triton(inputs: Inputs, save_states: bool) -> tuple[Tensor, ...]:
    """Forward pass. Arguments and results are those of :func:`learner_dual`."""
    from vision_ttt.ops.ttt_mlp.triton_forward import forward_kernel

    q = inputs.q
    call = LearnerCall(inputs)
    batch, length, heads, dim = q.shape
    count = 0
    if save_states:
        count = num_checkpoints(length, dim, inputs.mini_batch_size, layers=2)
    o = call.empty(*q.shape, dtype=q.dtype)
    state, kept = call.states(batch, heads), call.states(count, batch, heads)
    sums = call.states(batch, heads)[:3] if call.kind["SEVERAL"] else [None] * 3
    with torch.cuda.device_of(q):
        _launch(
            forward_kernel,
            call.programs,
            *(*call.views, *call.others, o, *state),
            *(kept if count else [None] * 4),
            *(*sums, None, None, None),
            *(*call.strides, call.state_batch, call.scale_head, *call.sizes),
            *(call.programs, inputs.eps),
            **call.kind,
        )
    return o, *state, *kept


def ttt_mlp_triton_backward(
    inputs: Inputs, grad_o: Tensor, *grads_and_kept: Tensor
) -> tuple[Tensor, ...]:
    """Backward pass. Arguments and results are those of :func:`learner_dual_backward`."""
    from vision_ttt.ops.ttt_mlp.triton_forward import forward_kernel
    from vision_ttt.ops.ttt_mlp.triton_scan import scan_kernel

    q, ln_weight, position_scale = inputs.q, inputs.ln_weight, inputs.position_scale
    size = inputs.mini_batch_size
    call = LearnerCall(inputs)
    batch, length, heads, dim = q.shape
    segments = num_checkpoints(length, dim, size, layers=2) + 1
    grad_o = contiguous_last(grad_o.to(q.dtype))
    grads_and_kept = tuple(x.float().contiguous() for x in grads_and_kept)
    grads, kept = grads_and_kept[:4], grads_and_kept[4:]

    # What the first kernel writes for the second: Z1, x̂, 1 / σ and mean(u x̂) of every token.
    # float16 has too small a range for them, and bfloat16 without a norm too few digits.
    dtype = q.dtype if q.dtype == torch.bfloat16 and ln_weight is not None else torch.float32
    z1 = call.empty(batch, length, heads, 4 * dim, dtype=dtype)
    x = call.empty(*q.shape)
    norm = None if ln_weight is None else call.empty(batch, length, heads, 2)
    states = call.states(segments, batch, heads)
    several = call.kind["SEVERAL"]
    sums = call.states(segments, batch, heads)[:3] if several else [None] * 3
    _, k, v = call.views
    eta, *_, weight, bias, scale = call.others
    with torch.cuda.device_of(q):
        _launch(
            forward_kernel,
            segments * call.programs,
            *(None, k, v, *call.others, None, *states, *kept),
            *(*sums, z1, x, norm),
            *(*call.strides, call.state_batch, call.scale_head, *call.sizes),
            *(call.programs, inputs.eps),
            **call.kind,
        )
        last = [x[-1] for x in states]
        sums = [None if x is None else x[-1] for x in sums]
        dsums = call.states(batch, heads)[:3] if several else [None] * 3
        between = (call.empty(call.programs, TILE, 4 * dim) for _ in range(2))
        dq, dk, dv = (call.empty(*q.shape, dtype=q.dtype) for _ in range(3))
        dstate, deta = call.states(batch, heads), call.empty(batch, length, heads)
        # Every program writes its own share of ∂γ and ∂β, every token and every mini-batch one of
        # ∂p, and PyTorch sums the shares in a fixed order.
        dweight = dbias = dscale = dlast = None
        if ln_weight is not None:
            dweight, dbias = (call.empty(batch, heads, dim) for _ in range(2))
        if position_scale is not None:
            dscale = call.empty(batch, length, heads)
            dlast = call.empty(batch, heads, -(-length // size))
        _launch(
            scan_kernel,
            call.programs,
            *(*call.views, eta, weight, bias, scale, grad_o, *grads),
            *(*kept, *last, z1, x, norm, *between, *sums, *dsums),
            *(dq, dk, dv, deta, *dstate, dweight, dbias, dscale, dlast),
            *(*call.strides, grad_o.stride()[:3], call.scale_head),
            *(*call.sizes, inputs.eps),
            **call.kind,
        )
    if dscale is not None:
        dscale = of_positions(dscale, dlast, size, inputs.reverse_heads)
    per_head = (None if x is None else x.sum(0) for x in (dweight, dbias, dscale))
    others = (deta, *dstate, *per_head)
    return dq, dk, dv, *(summed(x, like, q) for x, like in zip(others, inputs[3:-3], strict=True))


def launch_part(call: LearnerCall, *arguments: Any) -> None:
    """Run the kernel for a part of a mini-batch."""
    from vision_ttt.ops.ttt_mlp.triton_part import part_kernel

    constants = {name: x for name, x in call.kind.items() if name != "SEVERAL"}
    _launch(part_kernel, call.programs, *arguments, **constants)


BACKEND = Backend(ttt_mlp_triton, ttt_mlp_triton_backward, refusal)
