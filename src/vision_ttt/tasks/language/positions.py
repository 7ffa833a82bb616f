"""Positions of a sequence in bands: how much is predicted by how much context."""

from __future__ import annotations

from bisect import bisect_right

import torch
from torch import Tensor

_FIRST = 16
"""Positions of the first octave, which is one band."""
_PARTS = 2
"""Bands of each further octave."""


def band_edges(context: int) -> list[int]:
    """Return where bands of positions end: [16, 24, 32, 48, 64, 96, …, context].

    A token at position t (from 1) is predicted from t tokens. Bands grow with t, two per octave,
    because further context helps less the more there is.
    """
    edges = []
    start = _FIRST
    while start < context:
        edges += [start + start * part // _PARTS for part in range(_PARTS)]
        start *= 2
    edges = [edge for edge in edges if edge < context]
    return [*edges, context]


def octaves(edges: list[int]) -> list[list[int]]:
    """Return the bands of each octave, by their index: positions 1 to 16, 17 to 32, 33 to 64, …"""
    ends = [_FIRST * 2**power for power in range(edges[-1].bit_length())]
    grouped: dict[int, list[int]] = {}
    for band, edge in enumerate(edges):
        grouped.setdefault(bisect_right(ends, edge - 1), []).append(band)
    return list(grouped.values())


def band_of_position(context: int) -> Tensor:
    """Return the band of each position [context] int64."""
    edges = torch.tensor(band_edges(context))
    return torch.bucketize(torch.arange(1, context + 1), edges)
