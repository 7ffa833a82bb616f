"""The contract of linear."""

from typing import NamedTuple

from torch import Tensor

from vision_ttt.ops._contract import Contract


class Inputs(NamedTuple):
    """The op's arguments, shaped as below."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None


CONTRACT = Contract(
    "linear",
    {"x": "... D", "weight": "C D", "bias": "? C"},
    alike=("x", "weight", "bias"),
    autocast=True,
)
BACKWARD_CONTRACT = CONTRACT.backward({"grad": "... C"})
