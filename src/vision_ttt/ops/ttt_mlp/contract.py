"""The contracts of ttt_mlp. The hidden layer has 4 d units (TTT, Sec. 2.7)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

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


_STATE = {"w1": "d 4*d", "b1": "4*d", "w2": "4*d d", "b2": "d"}
CONTRACTS = learner_contracts("ttt_mlp", _STATE, tuple(_STATE))
