"""The contract of normed_swiglu_mlp, and what it keeps for the backward pass."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from vision_ttt.ops import _native
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


def kept_units(hidden: int) -> int:
    """The hidden units whose gates and values a call keeps; its backward pass computes the others.

    Three quarters of them, as whole vectors: with all, a step of Vittt-T at 1280² takes more memory
    than DeiT-T's. With tile registers none: products are cheap there, and keeping gained nothing.
    """
    if _native.instruction_set() in (None, "amx"):
        return 0
    return 3 * hidden // 4 // _native.LANES * _native.LANES


def _check_residual(op: str, values: Mapping[str, Any]) -> None:
    if not isinstance(values["residual"], bool):
        raise TypeError(f"{op}: residual must be a bool, got {values['residual']!r}")


def _check_backward(op: str, values: Mapping[str, Any]) -> None:
    _check_residual(op, values)
    columns, kept = 2 * kept_units(values["down"].shape[1]), values["kept"]
    if kept.shape[1] != columns:
        raise ValueError(f"{op}: kept must have {columns} columns, got shape {list(kept.shape)}")


_TENSORS = {
    "x": "... D",
    "norm_weight": "D",
    "norm_bias": "D",
    "up": "2*H D",
    "down": "D H",
}
_NUMBERS = {"eps": Real(0)}

CONTRACT = Contract(
    "normed_swiglu_mlp", _TENSORS, _NUMBERS, others=("residual",), further=_check_residual
)
BACKWARD_CONTRACT = Contract(
    "normed_swiglu_mlp_backward",
    {"grad": "... D", **_TENSORS, "kept": "N K"},
    _NUMBERS,
    others=("residual",),
    may_be_0="NK",
    further=_check_backward,
)
