"""The contract of selective_scan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from vision_ttt.ops._contract import Contract, Whole


class Inputs(NamedTuple):
    """The op's arguments: see the public function."""

    u: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    delta_bias: Tensor | None
    initial_state: Tensor | None
    delta_softplus: bool
    reverse_channels: int


class Part(NamedTuple):
    """Neighbouring channels that scan in one direction, and the groups that they are of."""

    channels: slice
    groups: slice
    reverse: bool


def parts(channels: int, groups: int, reverse_channels: int) -> Iterator[Part]:
    """The channels that scan from 1 to T, and those that scan from T to 1, where there are any."""
    forward = channels - reverse_channels
    per_group = channels // groups
    for start, stop, reverse in ((0, forward, False), (forward, channels, True)):
        if start < stop:
            # One group serves both directions.
            own = slice(0, 1) if groups == 1 else slice(start // per_group, stop // per_group)
            yield Part(slice(start, stop), own, reverse)


def num_groups(b: Tensor) -> int:
    """G of B or C [B, T, N] or [B, T, G, N]."""
    return b.shape[2] if b.ndim == 4 else 1


def _check_groups(op: str, values: Mapping[str, Any]) -> None:
    """Raise an error unless the channels form groups of one direction each."""
    if not isinstance(values["delta_softplus"], bool):
        raise TypeError(f"{op}: delta_softplus must be a bool, got {values['delta_softplus']!r}")
    b, c, reverse = values["B"], values["C"], values["reverse_channels"]
    channels, groups = values["u"].shape[2], num_groups(b)
    if b.shape != c.shape:
        raise ValueError(
            f"{op}: B and C must have one shape, got {list(b.shape)} and {list(c.shape)}"
        )
    if channels % groups:
        raise ValueError(f"{op}: {channels} channels do not form {groups} groups of B and C")
    if groups > 1 and reverse % (channels // groups):
        raise ValueError(
            f"{op}: reverse_channels must be a multiple of the {channels // groups} channels of a "
            f"group, which scan in one direction; got {reverse}"
        )


_TENSORS = {
    "u": "B T D",
    "delta": "B T D",
    "A": "D N",
    "B": "B T N | B T G N",
    "C": "B T N | B T G N",
    "D": "? D",
    "z": "? B T D",
    "delta_bias": "? D",
    "initial_state": "? B D N",
}
_ALIKE = "u", "delta", "B", "C", "z"
_RULES: dict[str, Any] = {
    "alike": _ALIKE,
    "others": ("delta_softplus",),
    "further": _check_groups,
}
_NUMBERS = {"reverse_channels": Whole(0, "D")}

CONTRACT = Contract("selective_scan", _TENSORS, _NUMBERS, autocast=True, **_RULES)
FORWARD_CONTRACT = Contract("selective_scan", _TENSORS, _NUMBERS, **_RULES)
BACKWARD_CONTRACT = Contract(
    "selective_scan_backward",
    {"grad_y": "B T D", "grad_state": "B D N", **_TENSORS, "kept_states": "P B D N"},
    _NUMBERS,
    may_be_0="BP",
    **_RULES,
)
