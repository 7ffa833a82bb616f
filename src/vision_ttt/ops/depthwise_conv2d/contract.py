"""The contract of depthwise_conv2d."""

from typing import NamedTuple

from torch import Tensor

from vision_ttt.ops._contract import Contract, Whole


class Inputs(NamedTuple):
    """The op's arguments, shaped as below."""

    x: Tensor
    weight: Tensor
    height: int
    width: int

    def grid(self) -> tuple[int, int]:
        """(h, w)."""
        return self.height, self.width


CONTRACT = Contract(
    "depthwise_conv2d",
    {"x": "B height*width C", "weight": "C 1 K K"},
    {"height": Whole(1), "width": Whole(1)},
    odd=("K",),
    may_be_0="BC",  # images may be folded into the channels
)
BACKWARD_CONTRACT = CONTRACT.backward({"grad": "B height*width C"})
