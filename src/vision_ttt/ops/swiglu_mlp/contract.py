"""The contract of swiglu_mlp."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from vision_ttt.ops._contract import Contract, Real


class Inputs(NamedTuple):
    """The op's arguments, shaped as below."""

    x: Tensor
    up: Tensor
    down: Tensor
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None
    residual: bool = False
    eps: float = 1e-6


def _check_residual(op: str, values: Mapping[str, Any]) -> None:
    if not isinstance(values["residual"], bool):
        raise TypeError(f"{op}: residual must be a bool, got {values['residual']!r}")
    dim, columns = values["x"].shape[-1], values["down"].shape[0]
    if values["residual"] and dim != columns:
        raise ValueError(f"{op}: residual needs as many columns as x has, {dim}, got {columns}")


_TENSORS = {
    "x": "... D",
    "up": "2*H D",
    "down": "E H",
    "norm_weight": "? D",
    "norm_bias": "? D",
}
_CHECKS: dict[str, Any] = {
    "numbers": {"eps": Real(0)},
    "together": ("norm_weight", "norm_bias"),
    "others": ("residual",),
    "further": _check_residual,
}
_ALIKE = ("x", "up", "down")
PUBLIC_CONTRACT = Contract("swiglu_mlp", _TENSORS, alike=_ALIKE, autocast=True, **_CHECKS)
CONTRACT = Contract("swiglu_mlp", _TENSORS, alike=_ALIKE, **_CHECKS)
BACKWARD_CONTRACT = Contract(
    "swiglu_mlp_backward", {"grad": "... E", **_TENSORS}, alike=("grad", *_ALIKE), **_CHECKS
)
