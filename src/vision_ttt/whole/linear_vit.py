"""A linearised ViT's block in bands: its inner models learn from all tokens, then are applied."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_ttt.acceleration.packed_linear import PackedLinear
from vision_ttt.acceleration.supported_parts import UnsupportedPart, require
from vision_ttt.layers import TTTAttention
from vision_ttt.layers.attention_inner import KEY_EPS, SwiGLUInner, ViT3Inner
from vision_ttt.models.linear_vit import LinearBlock
from vision_ttt.ops._native import LIBRARY
from vision_ttt.ops.swiglu_ttt.matrix_products import ascent, outputs
from vision_ttt.ops.vit3_ttt import (
    depthwise,
    depthwise_after,
    depthwise_ascent,
    gated_unit,
    gated_unit_after,
    gated_unit_ascent,
)
from vision_ttt.whole.bands import BandTokens
from vision_ttt.whole.sweeps import TOKENS, BandedBlock, Sweep

_CHUNK = 2048
"""Tokens that go through the MLP at once."""


class BandedLinear(BandedBlock):
    """:class:`vision_ttt.models.linear_vit.LinearBlock` in bands.

    If the inner model normalises the keys, a first sweep sums the keys and their squares. The next
    sweep sums in float64 what the step of the inner model needs. The last sweep applies the inner
    model after its step. The convolutions need one row on either side of a band.
    """

    kind = LinearBlock
    halo = 1
    side_width = 0

    def __init__(self, block: LinearBlock, dtype: torch.dtype, *, descending: bool) -> None:
        for name, part in block.named_modules():
            require(part, name or "it", type(part))
        require(block, "it", LinearBlock)
        require(block.attn, "attn", TTTAttention)
        kind = _INNER.get(type(block.attn.inner))
        if kind is None:
            names = " and ".join(each.__name__ for each in _INNER)
            raise UnsupportedPart(
                f"attn.inner is a {type(block.attn.inner).__name__}; in bands there are {names}"
            )
        self.block = copy.deepcopy(block).eval().float().requires_grad_(False)
        attention = self.block.attn
        self.heads = attention.num_heads, attention.head_dim
        self.views = [_rows_of(attention.qkv, each, dtype) for each in range(3)]
        attention.qkv = nn.Identity()
        for name, part in list(self.block.named_modules()):
            if isinstance(part, nn.Linear) and LIBRARY is not None:
                self.block.set_submodule(name, PackedLinear(part, dtype))
        width = attention.num_heads * attention.head_dim
        self.band_width = 8 * width + 2 * attention.proj.in_features
        self.inner = kind(self, attention.inner)
        first = [_Statistics(self, descending)] if isinstance(self.inner, _SwiGLU) else []
        learn, apply = _Learn(self, not descending), _Apply(self, descending)
        learn.goes_on = bool(first)
        self._sweeps = [*first, learn, apply]

    def sweeps(self) -> Sequence[Sweep]:
        """See :class:`BandedBlock`."""
        return self._sweeps

    def query(self, x: Tensor) -> Tensor:
        """q [1, n, H, d] of normalised tokens."""
        return self.block.attn.q_norm(self.views[0](x).unflatten(-1, self.heads))

    def key(self, x: Tensor) -> Tensor:
        """k [1, n, H, d] of normalised tokens."""
        return self.block.attn.k_norm(self.views[1](x).unflatten(-1, self.heads))

    def value(self, x: Tensor) -> Tensor:
        """v [1, n, H, d] of normalised tokens."""
        return self.views[2](x).unflatten(-1, self.heads)

    def normalised(self, band: BandTokens) -> tuple[Tensor, Tensor]:
        """LN of the image tokens, including those around the band, and LN of the other tokens."""
        return self.block.norm1(band.tokens), self.block.norm1(band.extra)

    def finish(self, band: BandTokens, o: Tensor) -> Tensor:
        """The next block's tokens, given o [1, n, H, d] of the band's image and other tokens."""
        block, before = self.block, torch.cat((band.own(band.tokens), band.extra), dim=1)
        out = torch.empty_like(before)
        for start in range(0, o.shape[1], _CHUNK):
            part = slice(start, start + _CHUNK)
            mixed = block.attn.proj(block.attn.norm(o[:, part].flatten(2)))
            x = before[:, part] + block.ls1(mixed)
            out[:, part] = x + block.ls2(block.mlp(block.norm2(x)))
        image, extra = out.split((out.shape[1] - band.extra.shape[1], band.extra.shape[1]), dim=1)
        return band._replace(extra=extra).sequence(image)


def _rows_of(qkv: nn.Linear, view: int, dtype: torch.dtype) -> nn.Module:
    """The projection to one of the three views."""
    width = qkv.out_features // 3
    rows = slice(view * width, (view + 1) * width)
    layer = nn.Linear(qkv.in_features, width, qkv.bias is not None, device="meta")
    layer.weight = nn.Parameter(qkv.weight[rows].clone(), requires_grad=False)
    if qkv.bias is not None:
        layer.bias = nn.Parameter(qkv.bias[rows].clone(), requires_grad=False)
    return layer if LIBRARY is None else PackedLinear(layer, dtype)


class _SwiGLU:
    """:class:`vision_ttt.layers.attention_inner.SwiGLUInner`, whose state begins with 2 C sums."""

    def __init__(self, block: BandedLinear, inner: SwiGLUInner) -> None:
        self.block, self.inner = block, inner
        self.up, self.down = torch.cat((inner.w1, inner.w2), dim=-1), inner.w3
        heads, d = block.heads
        self.statistics, self.sizes = 2 * heads * d, (2 * heads * d * d, heads * d * d)

    def keys(self, k: Tensor, numbers: Tensor, length: int) -> Tensor:
        """k [1, n, H, d], standardised by its mean and variance over all tokens."""
        mean, square = (numbers[: self.statistics] / length).view(2, *self.block.heads)
        variance = (square - mean.square()).clamp(min=0)
        return (k - mean.float()) * (variance + KEY_EPS).rsqrt().float()

    def on_grid(self, conv: nn.Module, x: Tensor, band: BandTokens) -> Tensor:
        """Convolve x [1, n, H, d] of the image tokens, and return the band's own tokens."""
        return band.own(conv(x.flatten(2), (band.rows, band.width))).unflatten(-1, x.shape[2:])

    def learn(self, band: BandTokens, numbers: Tensor) -> Tensor:
        """The sums over a band."""
        block, (x, extra) = self.block, self.block.normalised(band)
        k, others = (self.keys(block.key(each), numbers, band.length) for each in (x, extra))
        k = torch.cat((self.on_grid(self.inner.k_conv, k, band), others), dim=1)
        v = block.value(torch.cat((band.own(x), extra), dim=1))
        return torch.cat([sums.flatten() for sums in ascent(k, v, self.up, self.down)])

    def answer(self, band: BandTokens, sums: Tensor) -> Tensor:
        """o [1, n, H, d], given the sums over all tokens."""
        block, (x, extra) = self.block, self.block.normalised(band)
        scale = block.heads[1] ** -0.5 / band.length
        of_up, of_down = (scale * sums).float().split(self.sizes)
        up, down = self.up + of_up.view_as(self.up), self.down + of_down.view_as(self.down)
        q = self.on_grid(self.inner.q_conv, block.query(x), band)
        q = torch.cat((q, block.query(extra)), dim=1)
        return outputs(q, up.unsqueeze(1), down.unsqueeze(1))


class _ViT3:
    """:class:`vision_ttt.layers.attention_inner.ViT3Inner`."""

    statistics = 0

    def __init__(self, block: BandedLinear, inner: ViT3Inner) -> None:
        self.block, self.inner = block, inner
        heads, d = block.heads
        self.sizes = 2 * heads * d * d, 9 * d, 1

    def learn(self, band: BandTokens, numbers: Tensor) -> Tensor:
        """The sums over a band, and the number of its image tokens."""
        block, inner, (x, extra) = self.block, self.inner, self.block.normalised(band)
        both = torch.cat((band.own(x), extra), dim=1)
        units = gated_unit_ascent(block.key(both), block.value(both), inner.w1, inner.w2)
        _, k, v = inner.conv_qkv(x).chunk(3, dim=-1)
        # v is 0 around the band: the bands that own these rows count them.
        around = band.above * band.width, band.below * band.width
        v = F.pad(band.own(v), (0, 0, *around))
        kernels = depthwise_ascent(k.contiguous(), v, (band.rows, band.width), 3)
        count = units.new_tensor([band.own(x).shape[1]])
        return torch.cat((units.flatten(), kernels.flatten(), count))

    def answer(self, band: BandTokens, sums: Tensor) -> Tensor:
        """o [1, n, H, d], given the sums over all tokens."""
        block, inner, (x, extra) = self.block, self.inner, self.block.normalised(band)
        units, kernels, count = sums.split(self.sizes)
        heads, d = block.heads
        units, kernels = units.float().view(1, heads, d, 2 * d), kernels.float().view(1, d, 3, 3)
        w1, w2 = gated_unit_after(units, band.length, inner.w1, inner.w2)
        w3 = depthwise_after(kernels, int(count), inner.w3)
        o1 = gated_unit(block.query(torch.cat((band.own(x), extra), dim=1)), w1, w2)
        q = inner.conv_qkv(x)[..., :d].contiguous()
        o2 = inner.conv_proj(band.own(depthwise(q, w3, (band.rows, band.width))))
        return o1 + F.pad(o2, (0, 0, 0, extra.shape[1])).unflatten(-1, block.heads)


_INNER = {SwiGLUInner: _SwiGLU, ViT3Inner: _ViT3}


class _Statistics(Sweep):
    writes = None

    def run(self, band: BandTokens, state: Tensor | None) -> tuple[None, Tensor]:
        x, extra = self.block.normalised(band)
        k = self.block.key(torch.cat((band.own(x), extra), dim=1)).double()[0]
        sums = torch.stack((k.sum(0), k.square().sum(0))).flatten()
        return None, sums if state is None else state + sums


class _Learn(Sweep):
    writes = None

    def run(self, band: BandTokens, state: Tensor | None) -> tuple[None, Tensor]:
        inner = self.block.inner
        numbers = torch.zeros(0, dtype=torch.float64) if state is None else state
        sums = inner.learn(band, numbers).double()
        before, added = numbers[: inner.statistics], numbers[inner.statistics :]
        return None, torch.cat((before, added + sums if len(added) else sums))


class _Apply(Sweep):
    writes = TOKENS
    goes_on = True

    def run(self, band: BandTokens, state: Tensor) -> tuple[Tensor, Tensor]:
        inner = self.block.inner
        o = inner.answer(band, state[inner.statistics :])
        return self.block.finish(band, o), state
