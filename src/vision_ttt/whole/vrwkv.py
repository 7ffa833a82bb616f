"""The block of Vision-RWKV in bands: its two mixes, one after the other."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_ttt.acceleration.packed_linear import PackedLinear
from vision_ttt.acceleration.supported_parts import require
from vision_ttt.models.vrwkv import ChannelMix, SpatialMix, VRWKVBlock, q_shift
from vision_ttt.ops import selective_scan
from vision_ttt.ops._native import LIBRARY
from vision_ttt.whole.bands import BandTokens
from vision_ttt.whole.sweeps import SIDE, TOKENS, BandedBlock, Sweep

_CHUNK = 2048
"""Tokens that go through the channel mix's linear layers at once."""


class _BandedMix(BandedBlock):
    """One mix of a :class:`VRWKVBlock`: y + scale ⊙ mix(LN(y)), or scale ⊙ LN(mix(y)).

    One row around a band is read for the shift.
    """

    kind = VRWKVBlock
    halo = 1

    def __init__(self, block: VRWKVBlock, dtype: torch.dtype, mix: nn.Module, place: int) -> None:
        for name, part in block.named_modules():
            require(part, name or "it", type(part))
        require(block, "it", VRWKVBlock)
        self.mix = copy.deepcopy(mix).eval().float().requires_grad_(False)
        for name, part in list(self.mix.named_modules()):
            if isinstance(part, nn.Linear) and LIBRARY is not None:
                self.mix.set_submodule(name, PackedLinear(part, dtype))
        norm = copy.deepcopy((block.norm1, block.norm2)[place]).float().requires_grad_(False)
        self.before = nn.Identity() if block.post_norm else norm
        self.after = norm if block.post_norm else nn.Identity()
        scale = (block.scale1, block.scale2)[place]
        self.scale = None if scale is None else scale.detach().float()

    def views(self, band: BandTokens, y: Tensor) -> tuple[Tensor, Tensor]:
        """LN(y) of the band's own tokens, and what the shift makes of them [1, n, D]."""
        x = self.before(y)
        return band.own(x), band.own(q_shift(x, (band.rows, band.width)))

    def added(self, y: Tensor, branch: Tensor) -> Tensor:
        """y with the mix's result added."""
        branch = self.after(branch)
        return y + (branch if self.scale is None else self.scale * branch)


class BandedSpatialMix(_BandedMix):
    """The first half of a :class:`VRWKVBlock`.

    The first sweep finds the largest key of each channel, which is subtracted from the keys before
    the exponential. The second sweep scans in the opposite direction to the last one, and stores
    its sums. The last sweep runs the other scan and the rest.
    """

    def __init__(self, block: VRWKVBlock, dtype: torch.dtype, *, descending: bool) -> None:
        super().__init__(block, dtype, block.spatial_mix, 0)
        require(block.spatial_mix, "spatial_mix", SpatialMix)
        self.first = copy.deepcopy(block.norm0).float().requires_grad_(False)
        dim = block.norm1.normalized_shape[0]
        self.side_width, self.band_width = 2 * dim, 14 * dim
        self._sweeps = [
            _LargestKeys(self, descending),
            _Scan(self, not descending, SIDE),
            _Scan(self, descending, TOKENS),
        ]

    def sweeps(self) -> Sequence[Sweep]:
        """See :class:`BandedBlock`."""
        return self._sweeps

    def keys(self, x: Tensor, shifted: Tensor) -> Tensor:
        """k [1, n, D]."""
        return self.mix.key(torch.lerp(shifted, x, self.mix.mix_k))

    def scanned(
        self, terms: Tensor, before: Tensor, length: int, *, descending: bool
    ) -> tuple[Tensor, Tensor]:
        """Sums over the tokens before each one, in scan order, of terms [1, n, 2 D].

        Args:
            terms: of the tokens.
            before: [2 D], the sums after the previous band in scan order.
            length: T, tokens of the picture.
            descending: whether to scan from the last token.

        Returns:
            The sums [1, n, 2 D], and those behind the band.
        """
        one, width = terms.new_ones(()), terms.shape[2]
        sums, last = selective_scan(
            terms,
            one.expand(terms.shape),
            (-self.mix.decay / length).repeat(2).unsqueeze(1),
            one.expand(*terms.shape[:2], 1),
            one.expand(*terms.shape[:2], 1),
            reverse_channels=width if descending else 0,
            initial_state=before.view(1, width, 1),
            return_state=True,
        )
        first = before.expand(1, 1, width)
        parts = (sums[:, 1:], first) if descending else (first, sums[:, :-1])
        return torch.cat(parts, dim=1), last.flatten()


class _LargestKeys(Sweep):
    writes = None

    def run(self, band: BandTokens, state: Tensor | None) -> tuple[None, Tensor]:
        block = self.block
        largest = block.keys(*block.views(band, block.first(band.tokens))).amax(1)[0]
        return None, largest if state is None else largest.maximum(state)


class _Scan(Sweep):
    """Its state is the largest keys [D], and the sums [2 D] behind the band before."""

    goes_on = True

    def __init__(self, block: BandedSpatialMix, descending: bool, writes: str) -> None:
        self.block, self.descending, self.writes = block, descending, writes

    def run(self, band: BandTokens, state: Tensor) -> tuple[Tensor, Tensor]:
        block, mix = self.block, self.block.mix
        y = block.first(band.tokens)
        x, shifted = block.views(band, y)
        dim, end = x.shape[2], band.start + x.shape[1]
        largest, before = state[:dim], state[dim:]
        if end == band.length if self.descending else band.start == 0:
            before = largest.new_zeros(2 * dim)  # not those of the other direction
        weights = torch.exp(block.keys(x, shifted) - largest)
        terms = weights * mix.value(torch.lerp(shifted, x, mix.mix_v))
        terms = torch.cat((terms, weights), dim=-1)
        others, last = block.scanned(terms, before, band.length, descending=self.descending)
        state = torch.cat((largest, last))
        if self.writes == SIDE:
            return others, state
        own = torch.exp(mix.bonus / band.length).repeat(2) * terms
        numerator, denominator = others.add_(band.side).add_(own).chunk(2, dim=-1)
        r = torch.sigmoid(mix.receptance(torch.lerp(shifted, x, mix.mix_r)))
        return block.added(band.own(y), mix.output(r * (numerator / denominator))), state


class BandedChannelMix(_BandedMix, Sweep):
    """The second half of a :class:`VRWKVBlock`: one sweep without a state."""

    side_width = 0
    writes = TOKENS

    def __init__(self, block: VRWKVBlock, dtype: torch.dtype, *, descending: bool) -> None:
        super().__init__(block, dtype, block.channel_mix, 1)
        require(block.channel_mix, "channel_mix", ChannelMix)
        self.band_width, self.descending = 4 * block.norm2.normalized_shape[0], descending

    def sweeps(self) -> Sequence[Sweep]:
        """See :class:`BandedBlock`."""
        return [self]

    def run(self, band: BandTokens, state: None) -> tuple[Tensor, None]:
        """See :class:`Sweep`."""
        mix, y = self.mix, band.own(band.tokens)
        x, shifted = self.views(band, band.tokens)
        out = torch.empty_like(x)
        for start in range(0, x.shape[1], _CHUNK):
            part = slice(start, start + _CHUNK)
            own, moved = x[:, part], shifted[:, part]
            k = F.relu(mix.key(torch.lerp(moved, own, mix.mix_k))).square_()
            r = torch.sigmoid(mix.receptance(torch.lerp(moved, own, mix.mix_r)))
            out[:, part] = self.added(y[:, part], r * mix.value(k))
        return out, None
