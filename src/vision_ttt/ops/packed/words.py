"""Many tensors as one vector: a call then checks and describes a single tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

WORD = torch.int32
"""Of four bytes: a number in float32, or two in bfloat16. Casting a model leaves integers alone."""

LINE = 16
"""Words of a cache line; every tensor begins at one."""


class Place(NamedTuple):
    """Where a tensor lies in the vector, and what it is."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def words(self) -> int:
        """How many it takes; 0 for an empty tensor."""
        return math.prod(self.shape) * self.dtype.itemsize // 4

    @property
    def end(self) -> int:
        """Where the next one begins."""
        return self.start + -(-self.words // LINE) * LINE


def places(tensors: Iterable[tuple[tuple[int, ...], torch.dtype]]) -> tuple[Place, ...]:
    """Where tensors of such shapes and dtypes lie, one after the other."""
    found: list[Place] = []
    for shape, dtype in tensors:
        found.append(Place(found[-1].end if found else 0, shape, dtype))
    return tuple(found)


def join(tensors: Sequence[Tensor]) -> Tensor:
    """The vector [words] of the tensors, float32 or an even number of bfloat16, copied."""
    lines = []
    for x in tensors:
        words = x.detach().reshape(-1).view(WORD)
        lines.append(F.pad(words, (0, -len(words) % LINE)))
    return torch.cat(lines)


def split(words: Tensor, where: Iterable[Place]) -> list[Tensor]:
    """The tensors in a vector that :func:`join` made, as views of it."""
    return [
        words[place.start : place.start + place.words].view(place.dtype).view(place.shape)
        for place in where
    ]
