"""ViT³'s block in bands: its inner models learn from all tokens before they are applied to any."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vision_ttt.acceleration.packed_vit3 import (
    eps_of,
    parameters_of,
    require_supported_parts,
    sizes_of,
)
from vision_ttt.acceleration.supported_parts import require
from vision_ttt.layers import Mlp, ViT3Block
from vision_ttt.ops.packed import packed_vit3_band
from vision_ttt.ops.packed.vit3_band import BLOCK
from vision_ttt.ops.vit3_ttt.descent import LOSS_SCALE
from vision_ttt.whole.bands import BandTokens
from vision_ttt.whole.sweeps import TOKENS, BandedBlock, Sweep


class BandedViT3(BandedBlock):
    """:class:`vision_ttt.layers.ViT3Block` in bands.

    The first sweep sums what the inner models' steps need, the second applies the models after
    their step. Both read two rows around a band: one for each convolution on the way.
    """

    kind = ViT3Block
    halo = 2
    side_width = 0

    def __init__(self, block: ViT3Block, dtype: torch.dtype, *, descending: bool) -> None:
        require_supported_parts(block, ViT3Block)
        require(block.mlp, "mlp", Mlp)
        dim = block.ttt.proj.out_features
        self.sizes = BLOCK.sizes(**sizes_of(block), is_bfloat16=int(dtype == torch.bfloat16))
        self.eps = eps_of(block)
        self.weights = BLOCK.join(parameters_of(block), dim, self.sizes)
        self.band_width = dim + 3 * block.ttt.head_dim
        self._sweeps = [_Learn(self, not descending), _Apply(self, descending)]

    def sweeps(self) -> Sequence[Sweep]:
        """See :class:`BandedBlock`."""
        return self._sweeps

    def run(self, band: BandTokens, sums: Tensor | None) -> Tensor:
        """The sums over a band, or the next block's tokens."""
        return packed_vit3_band(
            *(band.tokens, self.weights, sums, self.sizes),
            rows=(band.width, band.above, band.below),
            total=band.length,
            loss_scale=LOSS_SCALE,
            eps=self.eps,
        )


class _Learn(Sweep):
    writes = None

    def run(self, band: BandTokens, state: Tensor | None) -> tuple[None, Tensor]:
        sums = self.block.run(band, None)
        return None, sums if state is None else state + sums


class _Apply(Sweep):
    writes = TOKENS
    goes_on = True

    def run(self, band: BandTokens, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.block.run(band, state), state
