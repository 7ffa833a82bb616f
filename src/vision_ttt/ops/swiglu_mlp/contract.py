"""The contract of swiglu_mlp."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from vision_ttt.ops._contract import Contract, Flag, Real


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
    dim, columns = values["x"].shape[-1], values["down"].shape[0]
    if values["residual"] and dim != columns:
        raise ValueError(f"{op}: residual needs as many columns as x has, {dim}, got {columns}")


CONTRACT = Contract(
    "swiglu_mlp",
    {"x": "... D", "up": "2*H D", "down": "E H", "norm_weight": "? D", "norm_bias": "? D"},
    {"residual": Flag(), "eps": Real(0)},
    alike=("x", "up", "down"),
    autocast=True,
    together=("norm_weight", "norm_bias"),
    further=_check_residual,
)
BACKWARD_CONTRACT = CONTRACT.backward({"grad": "... E"})
