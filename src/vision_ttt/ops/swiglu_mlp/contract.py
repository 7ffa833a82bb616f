"""The contract of swiglu_mlp."""

from typing import NamedTuple

from torch import Tensor

from vision_ttt.ops._contract import Contract


class Inputs(NamedTuple):
    """The op's arguments, shaped as below."""

    x: Tensor
    up: Tensor
    down: Tensor


_TENSORS = {"x": "... D", "up": "2*H D", "down": "E H"}
_ALIKE = tuple(_TENSORS)
PUBLIC_CONTRACT = Contract("swiglu_mlp", _TENSORS, alike=_ALIKE, autocast=True)
CONTRACT = Contract("swiglu_mlp", _TENSORS, alike=_ALIKE)
BACKWARD_CONTRACT = Contract(
    "swiglu_mlp_backward", {"grad": "... E", **_TENSORS}, alike=("grad", *_ALIKE)
)
