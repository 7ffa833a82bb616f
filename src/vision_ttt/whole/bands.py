"""Bands of token rows, in which a picture's tokens are read, changed and written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from vision_ttt.layers.extra_tokens import merge_extra, split_extra


class Band(NamedTuple):
    """Rows ``first`` … ``last`` - 1 of the token grid, and the class tokens among their tokens."""

    first: int
    last: int
    start: int
    """Place of the band's first token in the sequence, class tokens included."""
    extra: slice
    """Which of the class tokens lie in the band."""
    places: tuple[int, ...]
    """Their places in the band's own part of the sequence."""


def cut(grid: tuple[int, int], rows: int, positions: Sequence[int]) -> list[Band]:
    """Cut a grid (h, w) into bands of so many rows; the last one may be shorter.

    Args:
        grid: (h, w).
        rows: of a band.
        positions: of the class tokens in the sequence of all tokens, ascending.
    """
    height, width = grid
    # The number of image tokens before each class token.
    behind = [position - index for index, position in enumerate(positions)]
    bands, taken = [], 0
    for first in range(0, height, rows):
        last = min(first + rows, height)
        stop = last * width + (last == height)  # those behind all tokens are in the last band
        count = sum(place < stop for place in behind[taken:])
        start = first * width + taken
        places = tuple(position - start for position in positions[taken : taken + count])
        bands.append(Band(first, last, start, slice(taken, taken + count), places))
        taken += count
    return bands


class BandTokens(NamedTuple):
    """The tokens of a band that a sweep receives."""

    tokens: Tensor
    """[1, n, D], those of the band's rows, of ``above`` rows before and ``below`` behind them."""
    above: int
    below: int
    width: int
    """w, tokens of a row."""
    extra: Tensor
    """Its class tokens [1, m, D]."""
    places: tuple[int, ...]
    start: int
    """Place of its first token in the sequence."""
    length: int
    """N, tokens of the whole sequence."""
    side: Tensor | None
    """What an earlier sweep of the block wrote for its part of the sequence [1, n + m, S]."""

    @property
    def rows(self) -> int:
        """Rows of the tokens, those around the band included."""
        return self.tokens.shape[1] // self.width

    def own(self, x: Tensor) -> Tensor:
        """The part of x [1, n, …], which has an entry for each token, in the band's own rows."""
        return x[:, self.above * self.width : x.shape[1] - self.below * self.width]

    def sequence(self, image: Tensor) -> Tensor:
        """The band's part of the sequence: its image tokens with its class tokens among them."""
        return merge_extra(image, self.extra, self.places) if self.places else image


def separate(x: Tensor, places: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Undo :meth:`BandTokens.sequence`."""
    return split_extra(x, places) if places else (x, x[:, :0])
