"""The arguments, the state and the contracts of ttt_mlp.

The hidden layer has 4 d units (TTT, Sec. 2.7).
"""

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
    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor
    ln_weight: Tensor | None
    ln_bias: Tensor | None
    position_scale: Tensor | None
    mini_batch_size: int
    reverse_heads: int
    eps: float


class MLPState(NamedTuple):
    """What :func:`vision_ttt.ops.ttt_mlp` needs to go on after any token, in float32 at least.

    ``w1`` [B, H, d, 4d], ``b1`` [B, H, 4d], ``w2`` [B, H, 4d, d] and ``b2`` [B, H, d] are θ_T, as
    the last token sees them. The fields of ``start_`` are θ' before the mini-batch of that token,
    those of ``sum_`` its Σ η_s ∂ℓ_s/∂θ'. ``position``, and where fields are None, are as of
    :class:`vision_ttt.ops.LinearState`.
    """

    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor
    start_w1: Tensor | None = None
    start_b1: Tensor | None = None
    start_w2: Tensor | None = None
    start_b2: Tensor | None = None
    sum_w1: Tensor | None = None
    sum_b1: Tensor | None = None
    sum_w2: Tensor | None = None
    sum_b2: Tensor | None = None
    position: int | Tensor | None = None

    detach = states.detach
    select = states.select
    tensors = states.tensors
    to = states.to


_STATE = {"w1": "d 4*d", "b1": "4*d", "w2": "4*d d", "b2": "d"}
CONTRACTS = learner_contracts("ttt_mlp", _STATE, tuple(_STATE))
