"""The contract of depthwise_correlation."""

from typing import NamedTuple

from torch import Tensor

from vision_ttt.ops._contract import Contract, Whole


class Inputs(NamedTuple):
    """The op's arguments, shaped as below."""

    x: Tensor
    y: Tensor
    height: int
    width: int
    kernel_size: int

    def grid(self) -> tuple[int, int]:
        """(h, w)."""
        return self.height, self.width


CONTRACT = Contract(
    "depthwise_correlation",
    {"x": "B height*width C", "y": "B height*width C"},
    {"height": Whole(1), "width": Whole(1), "kernel_size": Whole(1)},
    odd=("kernel_size",),
    may_be_0="BC",  # images may be folded into the channels
)
