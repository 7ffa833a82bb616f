"""The contract of gated_norm."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from vision_ttt.ops._contract import Contract, Real


class Inputs(NamedTuple):
    """The op's arguments, shaped as below."""

    z: Tensor
    gate: Tensor | None
    weight: Tensor
    bias: Tensor
    eps: float


CONTRACT = Contract(
    "gated_norm",
    {"z": "B T R*D", "gate": "? B T D", "weight": "R D", "bias": "R D"},
    {"eps": Real(0)},
)
BACKWARD_CONTRACT = CONTRACT.backward({"grad": "B T D"})
