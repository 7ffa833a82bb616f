"""The contract of swiglu."""

from typing import NamedTuple

from torch import Tensor

from vision_ttt.ops._contract import Contract


class Inputs(NamedTuple):
    """The op's arguments, shaped as below."""

    x: Tensor


CONTRACT = Contract("swiglu", {"x": "... 2*H"})
BACKWARD_CONTRACT = CONTRACT.backward({"grad": "... H"})
