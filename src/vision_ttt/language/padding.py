"""Batches of sequences of several lengths: their tokens at the front, padding behind them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vision_ttt.ops.states import take


class Padding(NamedTuple):
    """Where the tokens of a batch [B, T] are.

    ``order`` [B, T] has the places of a row's tokens, then those of its padding, ``places`` [B, T]
    is its inverse, and ``lengths`` [B] are the tokens of each row. A token sees no later ones:
    behind the tokens padding changes nothing but the state, which leaves it out by the lengths.
    """

    order: Tensor
    places: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, mask: Tensor) -> Padding | None:
        """Of a mask [B, T], 0 for padding. None where no row has any, but while compiling."""
        real = mask != 0
        if not torch.compiler.is_compiling() and not real.is_meta and real.all():
            return None
        order = (~real).to(torch.int8).argsort(dim=1, stable=True)
        return cls(order, order.argsort(dim=1), real.sum(1))

    def behind(self, x: Tensor) -> Tensor:
        """Move the padding of x [B, T, D] behind its tokens."""
        return take(x, self.order)

    def back(self, x: Tensor) -> Tensor:
        """Move it to where it was."""
        return take(x, self.places)
