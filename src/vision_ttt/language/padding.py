"""Batches of sequences of several lengths: their tokens at the front, padding behind them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vision_ttt.ops.padding import fill_padding
from vision_ttt.ops.states import take


class Padding(NamedTuple):
    """Where the tokens of a batch [B, T] are.

    ``absent`` [B, T] is True at padding. ``order`` [B, T] has the places of a row's tokens, then
    those of its padding, ``places`` [B, T] is its inverse, and ``lengths`` [B] are the tokens of
    each row, by which blocks leave out what is behind them.
    """

    absent: Tensor
    order: Tensor
    places: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, mask: Tensor) -> Padding | None:
        """Of a mask [B, T], 0 for padding. None where no row has any, but while compiling."""
        absent = mask == 0
        if not torch.compiler.is_compiling() and not absent.is_meta and not absent.any():
            return None
        order = absent.to(torch.int8).argsort(dim=1, stable=True)
        return cls(absent, order, order.argsort(dim=1), (~absent).sum(1))

    def behind(self, x: Tensor) -> Tensor:
        """Move the padding of x [B, T, D] behind its tokens."""
        return take(x, self.order)

    def back(self, x: Tensor) -> Tensor:
        """Move it to where it was, where x becomes 0."""
        return fill_padding(take(x, self.places), self.absent)
