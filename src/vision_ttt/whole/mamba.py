"""The block of Vim and Mamba-Reg in bands."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vision_ttt.acceleration.packed_mamba import (
    eps_of,
    parameters_of,
    require_supported_parts,
    sizes_of,
)
from vision_ttt.layers import MambaBlock
from vision_ttt.ops.packed import packed_mamba_band
from vision_ttt.ops.packed.mamba_band import BLOCK, state_numbers
from vision_ttt.whole.bands import BandTokens
from vision_ttt.whole.sweeps import SIDE, TOKENS, BandedBlock, Sweep


class BandedMamba(BandedBlock):
    """:class:`vision_ttt.layers.MambaBlock` in bands.

    The first sweep runs the scan in the opposite direction to the last sweep, and stores its sums.
    The last sweep runs the other scan and the rest of the block.
    """

    kind = MambaBlock
    halo = 0

    def __init__(self, block: MambaBlock, dtype: torch.dtype, *, descending: bool) -> None:
        require_supported_parts(block)
        dim, sizes = block.mixer.in_proj.in_features, sizes_of(block)
        self.sizes = BLOCK.sizes(**sizes, is_bfloat16=int(dtype == torch.bfloat16))
        self.eps = eps_of(block)
        self.weights = BLOCK.join(parameters_of(block), dim, self.sizes)
        self.side_width, self.side_dtype = self.sizes.inner, dtype
        self.band_width = 2 * self.sizes.inner
        self._sweeps = [
            _Scan(self, descending=not descending, writes=SIDE),
            _Scan(self, descending=descending, writes=TOKENS),
        ]

    def sweeps(self) -> Sequence[Sweep]:
        """See :class:`BandedBlock`."""
        return self._sweeps


class _Scan(Sweep):
    def __init__(self, block: BandedMamba, *, descending: bool, writes: str) -> None:
        self.block, self.descending, self.writes = block, descending, writes

    def run(self, band: BandTokens, state: Tensor | None) -> tuple[Tensor, Tensor]:
        block = self.block
        return packed_mamba_band(
            band.sequence(band.tokens),
            block.weights,
            band.tokens.new_zeros(state_numbers(block.sizes)) if state is None else state,
            band.side,
            block.sizes,
            reverse=self.descending,
            eps=block.eps,
        )
