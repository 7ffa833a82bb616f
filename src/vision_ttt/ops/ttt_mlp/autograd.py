"""The custom op ``vision_ttt::ttt_mlp`` behind which every kernel backend stands, and its FLOPs.

A new backend is one more entry in KERNELS.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from vision_ttt.ops import _learner_kernels
from vision_ttt.ops._learner_op import Kernel, define_learner_ops
from vision_ttt.ops.ttt_linear.scan_order import mini_batches
from vision_ttt.ops.ttt_mlp.contract import CONTRACTS
from vision_ttt.ops.ttt_mlp.cpu import Call
from vision_ttt.ops.ttt_mlp.dual import (
    checkpoint_interval,
    num_checkpoints,
    ttt_mlp_dual,
    ttt_mlp_dual_backward,
)
from vision_ttt.ops.ttt_mlp.reference import ttt_mlp_reference

KERNELS: dict[str, Kernel] = {  # fastest first
    "cpu": Kernel(Call.run_forward, Call.run_backward, _learner_kernels.refusal),
    "dual": Kernel(ttt_mlp_dual, ttt_mlp_dual_backward, lambda q, mini_batch_size: None),
}

ttt_mlp_op, ttt_mlp_backward_op = define_learner_ops(
    "ttt_mlp",
    ("w1", "b1", "w2", "b2"),
    lambda: KERNELS,
    num_checkpoints,
    CONTRACTS,
    ttt_mlp_reference,
)


def _flops(tokens: int, dim: int, hidden: int, wide: int, narrow: int = 0) -> int:
    """FLOPs of ``wide`` products n·d·h, and ``narrow`` ones n·n·d and n·n·h each."""
    return 2 * tokens * (wide * dim * hidden + narrow * tokens * (dim + hidden))


@register_flop_formula(torch.ops.vision_ttt.ttt_mlp)
def ttt_mlp_flops(
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    v_shape: Sequence[int],
    eta_shape: Sequence[int],
    w1_shape: Sequence[int],
    *args: Any,
    **_: Any,
) -> int:
    """With a hidden width of 4 d: 28 T d² + 10 b T d multiply-adds per head."""
    batch, length, heads, dim = q_shape
    sizes = [stop - start for start, stop in mini_batches(length, args[6])]
    total = sum(_flops(n, dim, w1_shape[-1], wide=7, narrow=2) for n in sizes)
    return batch * heads * total


@register_flop_formula(torch.ops.vision_ttt.ttt_mlp_backward)
def ttt_mlp_backward_flops(grad_o_shape: Sequence[int], *args: Any, **_: Any) -> int:
    """Every mini-batch's products again with their derivatives, and the replay of its state."""
    batch, length, heads, dim = grad_o_shape
    hidden, mini_batch_size = args[8][-1], args[19]
    sizes = [stop - start for start, stop in mini_batches(length, mini_batch_size)]
    interval = checkpoint_interval(dim, mini_batch_size)
    replayed = [n for i, n in enumerate(sizes[:-1]) if (i + 1) % interval]
    total = sum(_flops(n, dim, hidden, wide=19, narrow=6) for n in sizes)
    return batch * heads * (total + sum(_flops(n, dim, hidden, wide=5) for n in replayed))
