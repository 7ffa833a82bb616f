"""Sweeps over a picture's bands, of which a block consists, and blocks that scan the sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vision_ttt.acceleration.packed_linear import PackedLinear
from vision_ttt.ops._native import LIBRARY
from vision_ttt.whole.bands import BandTokens, chunks, in_scan_order

TOKENS, SIDE = "tokens", "side"
"""Where a sweep writes: the tokens of the next block, or notes for a later sweep of this block."""


class Sweep(ABC):
    """One pass over all bands, from the first or from the last, with a state carried along."""

    descending: bool
    writes: str | None
    """TOKENS, SIDE or, where all that it finds is in its state, None."""
    state_kind: type[Any] | None
    """The class of the state, a named tuple of tensors with ``tensors``; None for no state."""
    goes_on: bool = False
    """Whether it begins with the state that the block's sweep before has left."""

    @abstractmethod
    def run(self, band: BandTokens, state: Any) -> tuple[Tensor | None, Any]:
        """What is written for a band's part of the sequence [1, n, …], and the state behind it.

        Args:
            band: its tokens.
            state: behind the band before, in the sweep's order; None at the first one.
        """


class BandedBlock(ABC):
    """A block in a form that goes through the tokens in bands.

    Args of every subclass: the block, whose parameters are copied, the packed weights' dtype, and
    whether the last sweep, which writes the tokens, begins at the last band. They raise
    :class:`vision_ttt.acceleration.supported_parts.UnsupportedPart` where a part of the block was
    replaced or changed.
    """

    kind: ClassVar[type[nn.Module]]
    halo: int
    """Rows on either side of a band that it reads."""
    side_width: int
    """S, numbers per token that its sweeps leave for later ones; 0 for none."""
    side_dtype: torch.dtype = torch.float32
    """The dtype of these numbers."""
    working_width: int = 0
    """Numbers per token of a chunk that are in memory at once."""
    band_width: int = 0
    """Numbers per token of a band that are, beside the tokens and what sweeps leave."""

    @abstractmethod
    def sweeps(self) -> Sequence[Sweep]:
        """Its sweeps in their order."""


def stored_side(blocks: Sequence[BandedBlock], storage: torch.dtype) -> torch.dtype:
    """The dtype in which sweeps' notes are stored, given that of tokens."""
    halves = all(block.side_dtype == torch.bfloat16 for block in blocks)
    return torch.bfloat16 if halves else storage


class Copy(Sweep):
    """Write what the sweep before has left."""

    writes, state_kind = TOKENS, None

    def __init__(self, *, descending: bool) -> None:
        self.descending = descending

    def run(self, band: BandTokens, state: None) -> tuple[Tensor, None]:
        """See :class:`Sweep`."""
        return band.side, None


def linear(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> nn.Module:
    """A linear layer of a copy of these parameters, for evaluation, packed if kernels are there."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach().float().clone(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().float().clone(), requires_grad=False)
    return layer if LIBRARY is None else PackedLinear(layer, dtype)


class ScanBlock(BandedBlock):
    """A block whose mixer scans the sequence in one direction or in both.

    ::

        y   ← y + what convolutions of the grid add           prepare
        z_r = scan of the direction r over norm(y)            scan
        y   ← of y and all z_r, token by token                merge

    The first sweep runs the scan that is not in the last sweep's direction and leaves its z_r; the
    last one runs the other scan and merges.
    """

    directions: int
    descending: bool
    state_kind: ClassVar[type[Any]]
    width: int
    """Numbers of z_r per token."""
    norm: nn.Module

    def prepare(self, band: BandTokens) -> Tensor:
        """The band's part of the sequence [1, n, D] before its norm."""
        return band.sequence(band.own(band.tokens))

    @abstractmethod
    def scan(self, direction: int, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """z_r [1, n, width] of x in scan order, 0 forward and 1 backward, and the state behind."""

    @abstractmethod
    def merge(self, y: Tensor, x: Tensor, z: Sequence[Tensor]) -> Tensor:
        """The next block's tokens, of each direction's z [1, n, width]."""

    def sweeps(self) -> Sequence[Sweep]:
        """See :class:`BandedBlock`."""
        scanned = range(self.directions)
        first = [_Scan(self, each) for each in scanned if bool(each) != self.descending]
        return [*first, _Merge(self, self.descending)]

    @property
    def side_width(self) -> int:
        """The scan of one direction is left for the last sweep."""
        return self.width


class _Scan(Sweep):
    writes = SIDE

    def __init__(self, block: ScanBlock, direction: int) -> None:
        self.block, self.direction, self.descending = block, direction, direction == 1
        self.state_kind = block.state_kind

    def run(self, band: BandTokens, state: Any) -> tuple[Tensor, Any]:
        y = self.block.prepare(band)
        out = y.new_empty(1, y.shape[1], self.block.width)
        for part in chunks(band.start, y.shape[1], band.length, descending=self.descending):
            x = in_scan_order(self.block.norm(y[:, part]), descending=self.descending)
            z, state = self.block.scan(self.direction, x, state)
            out[:, part] = in_scan_order(z, descending=self.descending)
        return out, state


class _Merge(Sweep):
    writes = TOKENS

    def __init__(self, block: ScanBlock, descending: bool) -> None:
        self.block, self.descending = block, descending
        self.direction = int(descending) if int(descending) < block.directions else None
        self.state_kind = None if self.direction is None else block.state_kind

    def run(self, band: BandTokens, state: Any) -> tuple[Tensor, Any]:
        y = self.block.prepare(band)
        out = torch.empty_like(y)
        for part in chunks(band.start, y.shape[1], band.length, descending=self.descending):
            before = y[:, part]
            x = self.block.norm(before)
            z = [] if band.side is None else [band.side[:, part]]
            if self.direction is not None:
                ordered = in_scan_order(x, descending=self.descending)
                own, state = self.block.scan(self.direction, ordered, state)
                z.insert(self.direction, in_scan_order(own, descending=self.descending))
            out[:, part] = self.block.merge(before, x, z)
        return out, state
