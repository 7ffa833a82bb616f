"""The contract of linear_pair."""

from typing import NamedTuple

from torch import Tensor

from vision_ttt.ops._contract import Contract


class Inputs(NamedTuple):
    """The op's arguments, shaped as below."""

    x: Tensor
    wide: Tensor
    narrow: Tensor
    narrow_bias: Tensor


_TENSORS = {"x": "... D", "wide": "C D", "narrow": "M D", "narrow_bias": "M"}
_ALIKE = tuple(_TENSORS)
PUBLIC_CONTRACT = Contract("linear_pair", _TENSORS, alike=_ALIKE, autocast=True)
CONTRACT = Contract("linear_pair", _TENSORS, alike=_ALIKE)
BACKWARD_CONTRACT = Contract(
    "linear_pair_backward",
    {"grad_wide": "... C", "grad_narrow": "... M", **_TENSORS},
    alike=("grad_wide", "grad_narrow", *_ALIKE),
)
