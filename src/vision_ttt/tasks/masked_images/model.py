"""The model that masked images train: a backbone with a mask token, and a linear decoder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vision_ttt.models.overlapping_patches import OverlappingPatchEmbed
from vision_ttt.tasks.images.pretraining import PretrainedBackbone, build_pretrained


class MaskedImageModel(PretrainedBackbone):
    """Images [B, C, H, W] and a mask [B, T] → the pixels of every patch [B, T, C · p · p].

    A linear layer predicts them from each token of the backbone, in which a learned token is in the
    place of each masked patch (SimMIM, Sec. 3).

    Args:
        backbone: of no classes; it is given the mask token.

    Raises:
        TypeError: the backbone is not plain.
        ValueError: its patches overlap, or it leaves patches out in training.
    """

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__(backbone)
        if isinstance(backbone.patch_embed, OverlappingPatchEmbed):
            raise ValueError("its patches overlap, and masked ones would show; leave out stride")
        if backbone.patch_drop_rate:
            raise ValueError(
                f"patch_drop_rate is {backbone.patch_drop_rate}; it must be 0, as every patch is"
                " predicted"
            )
        self.patch_size = tuple(backbone.patch_embed.patch_size)
        backbone.add_mask_token()
        pixels = backbone.in_chans * math.prod(self.patch_size)
        self.decoder = nn.Linear(backbone.embed_dim, pixels)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        tokens, _ = self.backbone.split_tokens(self.backbone.forward_features(x, mask))
        return self.decoder(tokens)


def build_masked_image_model(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Build the model around a backbone of no classes, randomly initialised.

    Raises:
        ConfigError: as :func:`vision_ttt.tasks.images.pretraining.build_pretrained`.
    """
    return build_pretrained(MaskedImageModel, name, {**arguments, "num_classes": 0})


def to_patches(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Images [B, C, H, W] → their patches [B, T, C · p · q] of `size` (p, q), row by row.

    Raises:
        ValueError: the images are not whole patches.
    """
    (height, width), (p, q) = images.shape[-2:], size
    if height % p or width % q:
        raise ValueError(f"images of {height} × {width} pixels are not whole patches of {p} × {q}")
    cells = images.unflatten(3, (width // q, q)).unflatten(2, (height // p, p))
    return cells.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # of [B, C, h, p, w, q]


def from_patches(patches: Tensor, size: tuple[int, int], grid: tuple[int, int]) -> Tensor:
    """Undo :func:`to_patches` for a grid (h, w): patches [B, T, C · p · q] → images."""
    cells = patches.unflatten(2, (-1, *size)).unflatten(1, grid)  # [B, h, w, C, p, q]
    return cells.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


def standardised(patches: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Patches [B, T, P] with mean 0 and variance 1 each, their means and deviations [B, T, 1]."""
    mean = patches.mean(-1, keepdim=True)
    centred = patches - mean
    deviation = (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return centred / deviation, mean, deviation


def random_mask(
    grid: tuple[int, int], ratio: float, side: int, generator: np.random.Generator
) -> Tensor:
    """A mask [T] of squares of `side` patches, which cover a share `ratio` of a grid (h, w).

    The number of squares is rounded up, but one is left. Those at the right and lower border are
    cut where the grid is not a multiple of them.

    Raises:
        ValueError: the grid holds one square only.
    """
    height, width = (-(-length // side) for length in grid)
    squares = height * width
    if squares < 2:
        raise ValueError(
            f"mask_size is {side}; the grid of {grid[0]} × {grid[1]} patches must hold at least two"
            " such squares"
        )
    mask = torch.zeros(squares, dtype=torch.bool)
    masked = min(math.ceil(ratio * squares), squares - 1)
    mask[torch.from_numpy(generator.permutation(squares)[:masked])] = True
    mask = mask.view(height, width).repeat_interleave(side, 0).repeat_interleave(side, 1)
    return mask[: grid[0], : grid[1]].flatten()
