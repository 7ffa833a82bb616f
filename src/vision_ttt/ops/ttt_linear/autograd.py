"""The custom op ``vision_ttt::ttt_linear`` behind which every kernel backend stands, and its FLOPs.

A new backend is one more entry in KERNELS.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from vision_ttt.ops import _learner_kernels
from vision_ttt.ops._learner_op import Kernel, define_learner_ops
from vision_ttt.ops.ttt_linear import triton_backend
from vision_ttt.ops.ttt_linear.contract import CONTRACTS
from vision_ttt.ops.ttt_linear.cpu import Call
from vision_ttt.ops.ttt_linear.dual import (
    checkpoint_interval,
    num_checkpoints,
    ttt_linear_dual,
    ttt_linear_dual_backward,
)
from vision_ttt.ops.ttt_linear.reference import ttt_linear_reference
from vision_ttt.ops.ttt_linear.scan_order import mini_batches

KERNELS: dict[str, Kernel] = {  # fastest first
    "cpu": Kernel(Call.run_forward, Call.run_backward, _learner_kernels.refusal),
    "triton": Kernel(
        triton_backend.ttt_linear_triton,
        triton_backend.ttt_linear_triton_backward,
        triton_backend.refusal,
    ),
    "dual": Kernel(ttt_linear_dual, ttt_linear_dual_backward, lambda q, mini_batch_size: None),
}

ttt_linear_op, ttt_linear_backward_op = define_learner_ops(
    "ttt_linear", ("w0", "b0"), lambda: KERNELS, num_checkpoints, CONTRACTS, ttt_linear_reference
)


def _flops(tokens: int, dim: int, wide: int, narrow: int = 0) -> int:
    """FLOPs of ``wide`` products n·d·d and ``narrow`` ones n·n·d in a mini-batch of n tokens."""
    return 2 * tokens * dim * (wide * dim + narrow * tokens)


@register_flop_formula(torch.ops.vision_ttt.ttt_linear)
def ttt_linear_flops(q_shape: Sequence[int], *args: Any, **_: Any) -> int:
    """Vision-TTT's Eq. 13, the op's share: 3 T d² + 2 b T d multiply-adds per head."""
    batch, length, heads, dim = q_shape
    sizes = [stop - start for start, stop in mini_batches(length, args[8])]
    return batch * heads * sum(_flops(n, dim, wide=3, narrow=2) for n in sizes)


@register_flop_formula(torch.ops.vision_ttt.ttt_linear_backward)
def ttt_linear_backward_flops(grad_o_shape: Sequence[int], *args: Any, **_: Any) -> int:
    """Every mini-batch's products again with their derivatives, and the replay of its state."""
    batch, length, heads, dim = grad_o_shape
    mini_batch_size = args[13]
    sizes = [stop - start for start, stop in mini_batches(length, mini_batch_size)]
    interval = checkpoint_interval(dim, mini_batch_size)
    replayed = [n for i, n in enumerate(sizes[:-1]) if (i + 1) % interval]
    total = sum(_flops(n, dim, wide=8, narrow=6) for n in sizes)
    return batch * heads * (total + sum(_flops(n, dim, wide=2) for n in replayed))
