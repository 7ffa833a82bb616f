"""ViT³'s block in bands: its inner models learn from all tokens before they are applied to any."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_ttt.acceleration.packed_vit3 import require_supported_parts
from vision_ttt.acceleration.supported_parts import require
from vision_ttt.layers import Mlp, ViT3Block
from vision_ttt.ops import depthwise_conv2d, states
from vision_ttt.ops.vit3_ttt import (
    depthwise,
    depthwise_after,
    depthwise_ascent,
    gated_unit,
    gated_unit_after,
    gated_unit_ascent,
)
from vision_ttt.whole.bands import BandTokens, chunks
from vision_ttt.whole.sweeps import TOKENS, BandedBlock, Sweep, linear


class Ascents(NamedTuple):
    """The sums over tokens by which the inner models step: of the gated units, of the kernels."""

    units: Tensor
    kernels: Tensor

    tensors = states.tensors


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
        self.descending = descending
        require(block.mlp, "mlp", Mlp)
        ttt, mlp = block.ttt, block.mlp
        self.heads, self.head_dim = ttt.num_heads, ttt.head_dim
        dim = ttt.num_heads * ttt.head_dim
        self.working_width = 10 * dim + 3 * mlp.fc1.out_features
        self.cpe, self.norm1, self.norm2 = (
            copy.deepcopy(part).float().requires_grad_(False)
            for part in (block.cpe, block.norm1, block.norm2)
        )
        self.w1, self.w2, self.w3 = (x.detach().float().clone() for x in (ttt.w1, ttt.w2, ttt.w3))
        bias = ttt.qkv.bias
        if bias is None:
            bias = ttt.qkv.weight.new_zeros(ttt.qkv.out_features)
        widths = [dim, dim, dim, *[ttt.head_dim] * 3]
        parts = dict(zip(("q1", "k1", "v1", "q2", "k2", "v2"), range(6), strict=True))
        weights, biases = ttt.qkv.weight.split(widths), bias.split(widths)

        def view(*names: str) -> Any:
            picked = [parts[name] for name in names]
            weight = torch.cat([weights[each] for each in picked])
            return linear(weight, torch.cat([biases[each] for each in picked]), dtype)

        self.keys_values, self.query = view("k1", "v1"), view("q1")
        self.small_keys_values, self.small_query = view("k2", "v2"), view("q2")
        self.proj = linear(ttt.proj.weight, ttt.proj.bias, dtype)
        self.fc1 = linear(mlp.fc1.weight, mlp.fc1.bias, dtype)
        self.fc2 = linear(mlp.fc2.weight, mlp.fc2.bias, dtype)

    def sweeps(self) -> Sequence[Sweep]:
        """See :class:`BandedBlock`."""
        return [_Learn(self, not self.descending), _Apply(self, self.descending)]

    def prepare(self, band: BandTokens) -> Tensor:
        """y + DWConv(y) of the band's rows and those around it; of the outermost ones any."""
        convolved = depthwise_conv2d(band.tokens, self.cpe.weight, (band.rows, band.width))
        return (convolved.add_(self.cpe.bias)).add_(band.tokens)

    def unit_views(self, x: Tensor, layer: Any) -> Sequence[Tensor]:
        """Views [1, n, H, d] of x."""
        views = layer(x).split(self.heads * self.head_dim, dim=-1)
        return [view.unflatten(-1, (self.heads, self.head_dim)) for view in views]

    def small_views(self, y: Tensor, layer: Any) -> Tensor:
        """Views for the convolution, of all rows that are there."""
        count = y.shape[1]
        parts = chunks(0, count, count, descending=False)
        return torch.cat([layer(self.norm1(y[:, part])) for part in parts], dim=1)


def _inner_rows(band: BandTokens, y: Tensor) -> tuple[Tensor, int, int]:
    """The rows of y that are right: at most one around the band; and the tokens above and below.

    Where the picture ends a row outside the band, that row is right, too.
    """
    above, below = min(band.above, 1), min(band.below, 1)
    first = (band.above - above) * band.width
    last = y.shape[1] - (band.below - below) * band.width
    return y[:, first:last], above * band.width, below * band.width


class _Learn(Sweep):
    writes = None
    state_kind = Ascents

    def __init__(self, block: BandedViT3, descending: bool) -> None:
        self.block, self.descending = block, descending

    def run(self, band: BandTokens, state: Ascents | None) -> tuple[None, Ascents]:
        block = self.block
        y, above, below = _inner_rows(band, block.prepare(band))
        k, v = block.small_views(y, block.small_keys_values).chunk(2, dim=-1)
        stop = v.shape[1] - below
        # Around the band, v counts in the bands that are there.
        v = F.pad(v[:, above:stop], (0, 0, above, below))
        grid = y.shape[1] // band.width, band.width
        kernels = depthwise_ascent(k.contiguous(), v, grid, block.w3.shape[-1])
        units = 0
        own = y[:, above:stop]
        for part in chunks(0, own.shape[1], own.shape[1], descending=False):
            k, v = block.unit_views(block.norm1(own[:, part]), block.keys_values)
            units = units + gated_unit_ascent(k, v, block.w1, block.w2)
        if state is None:
            return None, Ascents(units, kernels)
        return None, Ascents(state.units + units, state.kernels + kernels)


class _Apply(Sweep):
    writes = TOKENS
    state_kind = Ascents
    goes_on = True

    def __init__(self, block: BandedViT3, descending: bool) -> None:
        self.block, self.descending = block, descending

    def run(self, band: BandTokens, state: Ascents) -> tuple[Tensor, Ascents]:
        block = self.block
        w1, w2 = gated_unit_after(state.units, band.length, block.w1, block.w2)
        w3 = depthwise_after(state.kernels, band.length, block.w3)
        y, above, below = _inner_rows(band, block.prepare(band))
        q = block.small_views(y, block.small_query)
        grid = y.shape[1] // band.width, band.width
        stop = y.shape[1] - below
        small = depthwise(q, w3, grid)[:, above:stop]
        own = y[:, above:stop]
        out = torch.empty_like(own)
        for part in chunks(0, own.shape[1], own.shape[1], descending=False):
            before = own[:, part]
            (q,) = block.unit_views(block.norm1(before), block.query)
            units = gated_unit(q, w1, w2).flatten(2)
            after = before + block.proj(torch.cat((units, small[:, part]), dim=-1))
            out[:, part] = after + block.fc2(F.gelu(block.fc1(block.norm2(after))))
        return out, state
