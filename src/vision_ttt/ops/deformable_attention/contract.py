"""The contract of deformable_attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vision_ttt.ops._contract import Contract, Whole, check_number


class Inputs(NamedTuple):
    """The op's arguments, shaped as below."""

    value: Tensor
    locations: Tensor
    weights: Tensor
    spatial_shapes: Sequence[int]

    def levels(self) -> Iterator[tuple[int, int]]:
        """(h, w) of each level."""
        sizes = self.spatial_shapes
        return zip(sizes[::2], sizes[1::2], strict=True)


def _check_levels(op: str, values: Mapping[str, Any]) -> None:
    """Raise an error unless the spatial shapes are those of L levels of S tokens together."""
    shapes = values["spatial_shapes"]
    tokens, levels = values["value"].shape[1], values["locations"].shape[3]
    if not isinstance(shapes, (list, tuple, torch.Size)):
        raise TypeError(
            f"{op}: spatial_shapes must be h and w of each level in a list, got {shapes!r}"
        )
    for size in shapes:
        check_number(op, "a size of spatial_shapes", size, Whole(1))
    together = sum(h * w for h, w in zip(shapes[::2], shapes[1::2], strict=False))
    if len(shapes) != 2 * levels or together != tokens:
        raise ValueError(
            f"{op}: spatial_shapes must be h and w of {levels} levels of {tokens} tokens together, "
            f"got {list(shapes)}"
        )


CONTRACT = Contract(
    "deformable_attention",
    {"value": "B S H d", "locations": "B Q H L P 2", "weights": "B Q H L P"},
    others=("spatial_shapes",),
    further=_check_levels,
)
BACKWARD_CONTRACT = CONTRACT.backward({"grad": "B Q H*d"})
