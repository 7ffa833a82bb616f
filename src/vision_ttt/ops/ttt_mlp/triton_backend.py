"""TTT-MLP on a GPU: the launches of both passes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vision_ttt.ops._learner_dual import num_checkpoints
from vision_ttt.ops._learner_triton import LearnerCall, refusal
from vision_ttt.ops._op import Backend
from vision_ttt.ops.ttt_mlp.contract import Inputs


class Layout(NamedTuple):
    """Hidden units of a block, and a program's warps."""

    block: int
    warps: int


LAYOUTS = {16: Layout(32, 2), 32: Layout(32, 4), 64: Layout(32, 8), 128: Layout(32, 8)}
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


BACKEND = Backend(ttt_mlp_triton, None, refusal)
