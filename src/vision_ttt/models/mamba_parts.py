"""What Vim and Mamba-Reg share: patches with their positions, blocks, initialised as released."""

from __future__ import annotations

import math

import torch
from timm.layers import DropPath, PatchEmbed, calculate_drop_path_rates, lecun_normal_
from torch import nn

from vision_ttt.layers import BidirectionalMamba, MambaBlock
from vision_ttt.models.image_size import patch_embedding
from vision_ttt.models.overlapping_patches import OverlappingPatchEmbed


def mamba_patches(
    img_size: int | tuple[int, int],
    patch_size: int,
    in_chans: int,
    embed_dim: int,
    *,
    pad: bool,
    stride: int | None = None,
) -> PatchEmbed:
    """A patch embedding, normal with standard deviation (C · patch²)^-½, bias zero.

    Args:
        img_size, patch_size, in_chans, embed_dim, pad: as of
            :func:`vision_ttt.models.image_size.patch_embedding`.
        stride: pixels from patch to patch; by default the patch side.
    """
    if stride in (None, patch_size):
        patch_embed = patch_embedding(img_size, patch_size, in_chans, embed_dim, pad=pad)
    else:
        patch_embed = OverlappingPatchEmbed(
            img_size, patch_size, in_chans, embed_dim, stride=stride
        )
    lecun_normal_(patch_embed.proj.weight)
    nn.init.zeros_(patch_embed.proj.bias)
    return patch_embed


def mamba_blocks(
    embed_dim: int, depth: int, *, state: int, drop_path_rate: float
) -> list[MambaBlock]:
    """``depth`` blocks whose stochastic depth rises linearly from 0 to ``drop_path_rate``.

    Output projections are divided by √depth, so that the sum of all blocks' outputs keeps its
    scale.
    """
    blocks = [
        MambaBlock(
            embed_dim,
            mixer=BidirectionalMamba(embed_dim, state),
            drop_path=DropPath(rate),
        )
        for rate in calculate_drop_path_rates(drop_path_rate, depth)
    ]
    with torch.no_grad():
        for block in blocks:
            block.mixer.out_proj.weight /= math.sqrt(depth)
    return blocks
