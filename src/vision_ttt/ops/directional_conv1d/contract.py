"""The contract of directional_conv1d."""

from typing import NamedTuple

from torch import Tensor

from vision_ttt.ops._contract import Contract, Whole


class Inputs(NamedTuple):
    """The op's arguments, shaped as below."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    reverse_channels: int


CONTRACT = Contract(
    "directional_conv1d",
    {"x": "B T C", "weight": "C 1 K", "bias": "C"},
    {"reverse_channels": Whole(0, "C")},
)
BACKWARD_CONTRACT = CONTRACT.backward({"grad": "B T C"})
