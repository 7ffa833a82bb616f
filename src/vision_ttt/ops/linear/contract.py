"""The contract of linear."""

from typing import NamedTuple

from torch import Tensor

from vision_ttt.ops._contract import Contract


class Inputs(NamedTuple):
    """The op's arguments, shaped as below."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None


_TENSORS = {"x": "... D", "weight": "C D", "bias": "? C"}
_ALIKE = tuple(_TENSORS)
PUBLIC_CONTRACT = Contract("linear", _TENSORS, alike=_ALIKE, autocast=True)
CONTRACT = Contract("linear", _TENSORS, alike=_ALIKE)
BACKWARD_CONTRACT = Contract(
    "linear_backward", {"grad": "... C", **_TENSORS}, alike=("grad", *_ALIKE)
)
