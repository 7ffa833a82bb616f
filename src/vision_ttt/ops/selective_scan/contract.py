"""The arguments of selective_scan, and how they are divided."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from vision_ttt.ops._contract import Contract, Flag, Whole

CHUNK_TOKENS = 64
"""Tokens between two saved states: N numbers per 64 tokens and channel, a quarter of u for N = 16.

The kernels in csrc/scans/selective_scan have the same number.
"""


def num_chunks(length: int) -> int:
    """The number of saved states of a sequence, the initial one among them.

    State i is the one before a channel's tokens 64 i … 64 i + 63 in its own scan order.
    """
    return -(-length // CHUNK_TOKENS)


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


CONTRACT = Contract(
    "selective_scan",
    {
        "u": "B T D",
        "delta": "B T D",
        "A": "D N",
        "B": "B T N | B T G N",
        "C": "B T N | B T G N",
        "D": "? D",
        "z": "? B T D",
        "delta_bias": "? D",
        "initial_state": "? B D N",
    },
    {"delta_softplus": Flag(), "reverse_channels": Whole(0, "D")},
    alike=("u", "delta", "B", "C", "z"),
    autocast=True,
    further=_check_groups,
)
BACKWARD_CONTRACT = CONTRACT.backward(
    {"grad_y": "B T D", "grad_state": "B D N"}, {"kept_states": "P B D N"}, may_be_0="BP"
)
