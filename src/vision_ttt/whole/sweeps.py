"""Sweeps over a picture's bands. A block in bands is a sequence of sweeps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from vision_ttt.whole.bands import BandTokens

TOKENS, SIDE = "tokens", "side"
"""Where a sweep writes: the tokens of the next block, or data for a later sweep of this block."""


class Sweep(ABC):
    """One pass over all bands, from the first or from the last, with a state carried along."""

    writes: str | None
    """TOKENS or SIDE; None if the sweep writes only its state."""
    goes_on: bool = False
    """Whether it begins with the final state of the previous sweep of the block."""

    def __init__(self, block: BandedBlock, descending: bool) -> None:
        self.block, self.descending = block, descending

    @abstractmethod
    def run(self, band: BandTokens, state: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return what to write for a band's part of the sequence [1, n, …], and the state after it.

        Args:
            band: its tokens.
            state: a vector [S], the state after the band before in the sweep's order; None at the
                first band, and if the sweep carries no state.
        """


class BandedBlock(ABC):
    """A block in a form that goes through the tokens in bands.

    The constructor of every subclass takes the block, whose parameters are copied, the packed
    weights' dtype, and whether the last sweep, which writes the tokens, begins at the last band. It
    raises :class:`vision_ttt.acceleration.supported_parts.UnsupportedPart` if a part of the block
    was replaced or changed.
    """

    kind: ClassVar[type[nn.Module]]
    halo: int
    """Rows on either side of a band that it reads."""
    side_width: int
    """S, numbers per token that its sweeps leave for later ones; 0 for none."""
    side_dtype: torch.dtype = torch.float32
    """The dtype of these numbers."""
    band_width: int
    """Numbers per token of a band that are in memory at once, beside the tokens and what its sweeps
    leave."""

    @abstractmethod
    def sweeps(self) -> Sequence[Sweep]:
        """Its sweeps in their order."""


def stored_side(blocks: Sequence[BandedBlock], storage: torch.dtype) -> torch.dtype:
    """The dtype in which the data between sweeps is stored, given the dtype of stored tokens."""
    halves = all(block.side_dtype == torch.bfloat16 for block in blocks)
    return torch.bfloat16 if halves else storage


class Copy(Sweep):
    """Write as tokens what the previous sweep has stored."""

    writes = TOKENS

    def run(self, band: BandTokens, state: None) -> tuple[Tensor, None]:
        """See :class:`Sweep`."""
        return band.side, None
