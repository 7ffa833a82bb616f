"""The arguments, the state and the contracts of ttt_linear."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from vision_ttt.ops import states
from vision_ttt.ops._learner_contract import learner_contracts


class Inputs(NamedTuple):
    """The op's arguments: see the public function."""

    q: Tensor
    k: Tensor
    v: Tensor
    eta: Tensor
    w0: Tensor
    b0: Tensor
    ln_weight: Tensor | None
    ln_bias: Tensor | None
    position_scale: Tensor | None
    mini_batch_size: int
    reverse_heads: int
    eps: float


class LinearState(NamedTuple):
    """What :func:`vision_ttt.ops.ttt_linear` needs to go on after any token, in float32 at least.

    ``w`` [B, H, d, d] and ``b`` [B, H, d] are W_T and b_T, as the last token sees them. ``start_w``
    and ``start_b`` are W' and b' before the mini-batch of that token, ``sum_w`` and ``sum_b`` its
    Σ η_s k_sᵀ g_s and Σ η_s g_s, ``position`` the number of its tokens: 0 where the last
    mini-batch is complete, in which case w is start_w. Sequences at different places of their
    mini-batches have a position each, [B]. The rest is None where heads scan in two directions, and
    such a state does not go on.
    """

    w: Tensor
    b: Tensor
    start_w: Tensor | None = None
    start_b: Tensor | None = None
    sum_w: Tensor | None = None
    sum_b: Tensor | None = None
    position: int | Tensor | None = None

    detach = states.detach
    select = states.select
    tensors = states.tensors
    to = states.to


CONTRACTS = learner_contracts("ttt_linear", {"w0": "d d", "b0": "d"}, ("w", "b"))
