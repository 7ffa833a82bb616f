"""The contract of normed_swiglu_mlp."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from vision_ttt.ops._contract import Contract, Real


class Inputs(NamedTuple):
    """The op's arguments, shaped as below."""

    x: Tensor
    norm_weight: Tensor
    norm_bias: Tensor
    up: Tensor
    down: Tensor
    residual: bool
    eps: float


def _check_residual(op: str, values: Mapping[str, Any]) -> None:
    if not isinstance(values["residual"], bool):
        raise TypeError(f"{op}: residual must be a bool, got {values['residual']!r}")


_TENSORS = {
    "x": "... D",
    "norm_weight": "D",
    "norm_bias": "D",
    "up": "2*H D",
    "down": "D H",
}
_RULES: dict[str, Any] = {"others": ("residual",), "further": _check_residual}
_NUMBERS = {"eps": Real(0)}

CONTRACT = Contract("normed_swiglu_mlp", _TENSORS, _NUMBERS, **_RULES)
BACKWARD_CONTRACT = Contract(
    "normed_swiglu_mlp_backward", {"grad": "... D", **_TENSORS}, _NUMBERS, **_RULES
)
