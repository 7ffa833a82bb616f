"""Vision-RWKV: a plain backbone of bidirectional WKV, a linear baseline of Vision-TTT."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import DropPath, calculate_drop_path_rates
from torch import Tensor, nn

from vision_ttt.layers.grid import check_grid
from vision_ttt.layers.norm_precision import normalised
from vision_ttt.models.arguments import check_arguments, check_sides
from vision_ttt.models.classifier import linear_head
from vision_ttt.models.family import Family
from vision_ttt.models.image_size import patch_embedding, position_embedding
from vision_ttt.models.plain_backbone import PlainBackbone
from vision_ttt.ops import selective_scan
from vision_ttt.ops.vit3_ttt.descent import at_least_float32, without_autocast

torch.fx.wrap("bi_wkv")
torch.fx.wrap("check_grid")
torch.fx.wrap("q_shift")


def bi_wkv(k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor) -> Tensor:
    """Attend with exponential decay in both directions (Vision-RWKV, Eq. 5), per channel::

        α_ti = exp(k_i - (|t - i| - 1) decay / T)  for i ≠ t,     α_tt = exp(k_t + bonus / T)
        o_t  = Σ_i α_ti v_i / Σ_i α_ti

    Both sums are two scans of one :func:`vision_ttt.ops.selective_scan` whose states have one
    number, so that time and memory are linear in T. The exponentials are relative to the largest
    key of a channel. That key's weight falls by at most exp(-decay) over the sequence, so no
    denominator underflows in float32 for |decay| below 80. Sums are float32 also under autocast.

    The paper divides decay alone by T; the release divides bonus, too, and so does this function.

    Args:
        k, v: keys and values [B, T, D].
        decay, bonus: [D].

    Returns:
        o [B, T, D] in v's dtype.
    """
    length = k.shape[1]
    with without_autocast(k):
        keys, values, decay, bonus = at_least_float32(k, v, decay, bonus)
        decay, bonus = decay / length, bonus / length
        weights = torch.exp(keys - keys.detach().amax(1, keepdim=True))
        terms = torch.cat([weights * values, weights], dim=-1)  # [B, T, 2 D]
        one = terms.new_ones(())
        sums = selective_scan(
            torch.cat([terms, terms], dim=-1),
            one.expand(*terms.shape[:2], 2 * terms.shape[2]),
            -decay.repeat(4).unsqueeze(1),
            one.expand(*terms.shape[:2], 1),
            one.expand(*terms.shape[:2], 1),
            reverse_channels=terms.shape[2],
        )
        before, after = sums.chunk(2, dim=-1)  # each with the token's own term
        others = F.pad(before[:, :-1], (0, 0, 1, 0)) + F.pad(after[:, 1:], (0, 0, 0, 1))
        sums = others + torch.exp(bonus).repeat(2) * terms
        numerator, denominator = sums.chunk(2, dim=-1)
        return (numerator / denominator).to(v.dtype)


def q_shift(x: Tensor, grid: tuple[int, int]) -> Tensor:
    """Tokens [B, h · w, D] of which each quarter of the channels comes from another neighbour.

    Left, right, upper and lower neighbour, in this order; zeros beyond the border.
    """
    left, right, upper, lower = x.unflatten(1, grid).chunk(4, dim=-1)
    moved = (
        F.pad(left, (0, 0, 1, -1)),
        F.pad(right, (0, 0, -1, 1)),
        F.pad(upper, (0, 0, 0, 0, 1, -1)),
        F.pad(lower, (0, 0, 0, 0, -1, 1)),
    )
    return torch.cat(moved, dim=-1).flatten(1, 2)


class SpatialMix(nn.Module):
    """The token mixer of Vision-RWKV: [B, T, D], (h, w) → [B, T, D].

    ::

        x_s     = s ⊙ x + (1 - s) ⊙ q_shift(x)       s one of mix_r, mix_k, mix_v
        r, k, v = Linear(x_r), Linear(x_k), Linear(x_v)
        out     = Linear_o(σ(r) ⊙ bi_wkv(k, v))       no biases

    Args:
        dim: D, a multiple of 4.
        index, depth: of the block and their number, for the initialisation of RWKV: decay from -5
            to 3 and shares s from 0 to 1 along the channels, steeper in later blocks.
    """

    def __init__(self, dim: int, index: int, depth: int) -> None:
        super().__init__()
        progress, rest = index / max(1, depth - 1), 1 - index / depth
        channel = torch.arange(dim)
        share = channel / dim
        speed = (channel / max(1, dim - 1)) ** (0.7 + 1.3 * progress)
        self.decay = nn.Parameter(8 * speed - 5)
        self.bonus = nn.Parameter(math.log(0.3) + 0.5 * ((channel + 1) % 3 - 1))
        self.mix_k = nn.Parameter(share**rest)
        self.mix_v = nn.Parameter(share**rest + 0.3 * progress)
        self.mix_r = nn.Parameter(share ** (0.5 * rest))
        self.key, self.value, self.receptance, self.output = (
            nn.Linear(dim, dim, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        shifted = q_shift(x, grid)
        k = self.key(torch.lerp(shifted, x, self.mix_k.to(x.dtype)))
        v = self.value(torch.lerp(shifted, x, self.mix_v.to(x.dtype)))
        r = self.receptance(torch.lerp(shifted, x, self.mix_r.to(x.dtype)))
        return self.output(torch.sigmoid(r) * bi_wkv(k, v, self.decay, self.bonus))


class ChannelMix(nn.Module):
    """The MLP of Vision-RWKV: [B, T, D], (h, w) → [B, T, D].

    ::

        out = σ(Linear(x_r)) ⊙ Linear_v(ReLU(Linear_k(x_k))²)      4 D wide, no biases

    Args:
        dim, index, depth: as of :class:`SpatialMix`.
    """

    def __init__(self, dim: int, index: int, depth: int) -> None:
        super().__init__()
        share = (torch.arange(dim) / dim) ** (1 - index / depth)
        self.mix_k, self.mix_r = nn.Parameter(share), nn.Parameter(share.clone())
        self.key = nn.Linear(dim, 4 * dim, bias=False)
        self.receptance = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        shifted = q_shift(x, grid)
        k = F.relu(self.key(torch.lerp(shifted, x, self.mix_k.to(x.dtype)))).square()
        r = self.receptance(torch.lerp(shifted, x, self.mix_r.to(x.dtype)))
        return torch.sigmoid(r) * self.value(k)


class VRWKVBlock(nn.Module):
    """The block of Vision-RWKV on tokens y [B, T, D] of a grid (h, w)::

        y ← y + scale1 ⊙ SpatialMix(LN(y))       post_norm: scale1 ⊙ LN(SpatialMix(y))
        y ← y + scale2 ⊙ ChannelMix(LN(y))       post_norm: scale2 ⊙ LN(ChannelMix(y))

    Args:
        dim, index, depth: as of :class:`SpatialMix`. The first block normalises its input.
        post_norm: normalise the branches' results instead of their inputs.
        init_scale: first value of scale1 and scale2 [D]; None for no scales.
        drop_path: applied to both branches.
    """

    def __init__(
        self,
        dim: int,
        index: int,
        depth: int,
        *,
        post_norm: bool,
        init_scale: float | None,
        drop_path: nn.Module,
    ) -> None:
        super().__init__()
        self.post_norm = post_norm
        self.norm0 = nn.LayerNorm(dim) if index == 0 else nn.Identity()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.spatial_mix = SpatialMix(dim, index, depth)
        self.channel_mix = ChannelMix(dim, index, depth)
        self.drop_path = drop_path
        self.scale1 = self.scale2 = None
        if init_scale is not None:
            self.scale1 = nn.Parameter(torch.full((dim,), float(init_scale)))
            self.scale2 = nn.Parameter(torch.full((dim,), float(init_scale)))

    def forward(self, y: Tensor, grid: tuple[int, int]) -> Tensor:
        """Run the block.

        Raises:
            ValueError: T is not h · w.
        """
        check_grid(y.shape[1], grid)
        y = self.norm0(y)
        for mix, norm, scale in (
            (self.spatial_mix, self.norm1, self.scale1),
            (self.channel_mix, self.norm2, self.scale2),
        ):
            branch = normalised(norm, mix(y, grid)) if self.post_norm else mix(norm(y), grid)
            y = y + self.drop_path(branch if scale is None else scale * branch)
        return y


class VRWKV(PlainBackbone):
    """Vision-RWKV backbone and classifier: images [B, C, H, W] → logits [B, num_classes].

    A patch embedding with learned positions, ``depth`` blocks :class:`VRWKVBlock`, LayerNorm, the
    mean of the tokens and a linear head. Cost and memory are linear in the number of tokens.

    Args:
        img_size, patch_size, in_chans, num_classes, depth, dynamic_img_size, dynamic_img_pad,
            drop_rate, drop_path_rate, patch_drop_rate: see :class:`vision_ttt.models.Vittt`.
        embed_dim: D, a multiple of 4.
        post_norm, init_scale: of the blocks.
        global_pool: "avg" (published) or "max_norm"; "" applies the head to each token.

    Initialisation, the release's: projections and head normal with standard deviation 0.02,
    positions zero, patches PyTorch's default, norms the identity, and what :class:`SpatialMix`
    says.

    Raises:
        ValueError: an argument is out of its range; in forward, an image does not fit.
        TypeError: an argument is of another type.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        embed_dim: int = 192,
        depth: int = 12,
        post_norm: bool = False,
        init_scale: float | None = None,
        global_pool: str = "avg",
        dynamic_img_size: bool = False,
        dynamic_img_pad: bool = False,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        patch_drop_rate: float = 0.0,
    ) -> None:
        check_arguments(
            in_chans=in_chans,
            num_classes=num_classes,
            embed_dim=embed_dim,
            depth=depth,
            post_norm=post_norm,
            dynamic_img_size=dynamic_img_size,
            dynamic_img_pad=dynamic_img_pad,
            drop_rate=drop_rate,
            drop_path_rate=drop_path_rate,
            patch_drop_rate=patch_drop_rate,
        )
        check_sides(img_size, patch_size, whole_patches=not dynamic_img_size, pad=dynamic_img_pad)
        if embed_dim % 4:
            raise ValueError(f"embed_dim is {embed_dim}; it must be a multiple of 4")
        if isinstance(init_scale, bool) or not isinstance(init_scale, int | float | None):
            raise TypeError(f"init_scale is {init_scale!r}; accepted: a number or None")
        patch_embed = patch_embedding(
            img_size, patch_size, in_chans, embed_dim, pad=dynamic_img_pad
        )
        rates = calculate_drop_path_rates(drop_path_rate, depth)
        super().__init__(
            patch_embed=patch_embed,
            pos_embed=nn.init.zeros_(position_embedding(patch_embed)),
            blocks=[
                VRWKVBlock(
                    embed_dim,
                    index,
                    depth,
                    post_norm=post_norm,
                    init_scale=init_scale,
                    drop_path=DropPath(rate),
                )
                for index, rate in enumerate(rates)
            ],
            norm=nn.LayerNorm(embed_dim),
            head=linear_head(embed_dim, num_classes),
            global_pool=global_pool,
            dynamic_img_size=dynamic_img_size,
            drop_rate=drop_rate,
            patch_drop_rate=patch_drop_rate,
        )
        for module in self.blocks.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)


MODELS: dict[str, dict[str, Any]] = {
    "vrwkv_nano_patch4_32": {"embed_dim": 104, "depth": 4, "patch_size": 4, "img_size": 32},
    "vrwkv_tiny_patch16_224": {"embed_dim": 192},
    "vrwkv_small_patch16_224": {"embed_dim": 384, "post_norm": True, "init_scale": 1},
    "vrwkv_base_patch16_224": {"embed_dim": 768, "post_norm": True, "init_scale": 1e-5},
}

FAMILY = Family(VRWKV, MODELS, __name__, fixed=True)
default_cfgs = FAMILY.default_cfgs

vrwkv_nano_patch4_32 = FAMILY.entrypoint(
    "vrwkv_nano_patch4_32",
    "Vision-RWKV for 32 × 32 images and a laptop: 64 tokens, as many parameters as vittt_nano.",
)
vrwkv_tiny_patch16_224 = FAMILY.entrypoint(
    "vrwkv_tiny_patch16_224",
    "VRWKV-T: 6.2M parameters, 1.2G MACs, 75.1 % on ImageNet-1K (the authors' figures).",
)
vrwkv_small_patch16_224 = FAMILY.entrypoint(
    "vrwkv_small_patch16_224",
    "VRWKV-S: 23.8M parameters, 4.6G MACs, 80.1 % on ImageNet-1K (the authors' figures).",
)
vrwkv_base_patch16_224 = FAMILY.entrypoint(
    "vrwkv_base_patch16_224",
    "VRWKV-B: 93.7M parameters, 18.2G MACs, 82.0 % on ImageNet-1K (the authors' figures).",
)
