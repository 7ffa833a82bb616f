"""The contracts of ttt_linear."""

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
    w0: Tensor
    b0: Tensor
    ln_weight: Tensor | None
    ln_bias: Tensor | None
    position_scale: Tensor | None
    mini_batch_size: int
    reverse_heads: int
    eps: float


CONTRACTS = learner_contracts("ttt_linear", {"w0": "d d", "b0": "d"}, ("w", "b"))
