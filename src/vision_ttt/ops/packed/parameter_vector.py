"""Many parameters as one vector of words, so that a call has a single tensor to check."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

WORD = torch.int32
"""The vector's dtype: four bytes hold one float32 or two bfloat16 numbers. As an integer dtype it
is unaffected by ``model.to(dtype)``."""

LINE = 16
"""Words of a cache line. Every tensor begins at the start of a line."""


class Place(NamedTuple):
    """The place of a tensor in the vector, its shape and its dtype."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def words(self) -> int:
        """The number of words of the tensor; 0 for an empty one."""
        return math.prod(self.shape) * self.dtype.itemsize // 4

    @property
    def end(self) -> int:
        """The start of the next tensor."""
        return self.start + -(-self.words // LINE) * LINE


def places(tensors: Iterable[tuple[tuple[int, ...], torch.dtype]]) -> tuple[Place, ...]:
    """The places of tensors with these shapes and dtypes, one after the other."""
    found: list[Place] = []
    for shape, dtype in tensors:
        found.append(Place(found[-1].end if found else 0, shape, dtype))
    return tuple(found)


def join(tensors: Sequence[Tensor]) -> Tensor:
    """Copy the tensors, float32 or an even number of bfloat16, into a vector [words]."""
    lines = []
    for x in tensors:
        words = x.detach().reshape(-1).view(WORD)
        lines.append(F.pad(words, (0, -len(words) % LINE)))
    return torch.cat(lines)


def split(words: Tensor, where: Iterable[Place]) -> list[Tensor]:
    """Return the tensors in a vector of :func:`join` as views of it."""
    return [
        words[place.start : place.start + place.words].view(place.dtype).view(place.shape)
        for place in where
    ]
