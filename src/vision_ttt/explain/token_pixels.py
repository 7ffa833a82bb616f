"""Which pixels of an image are a token's, where the model pads it or its patches overlap.

Shape letters: H and W the image's sides, h and w the map's. A step is the rows and columns of
pixels from token to token, see :func:`vision_ttt.explain.feature_maps.token_grid`. The last token
of a side has all pixels that are left: fewer than the step where the model pads the image, more
where patches overlap.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

_LONGEST = 8  # times the other side of a place in a figure


def check_patch(patch: Sequence[int], sides: Sequence[int], grid: Sequence[int]) -> None:
    """Check that a step gives every token at least one pixel.

    Args:
        patch: the step.
        sides: H and W.
        grid: h and w.

    Raises:
        ValueError: it does not, or the step is not two whole numbers of at least 1.
    """
    whole = (
        isinstance(patch, Sequence)
        and len(patch) == 2
        and all(isinstance(step, int) and step >= 1 for step in patch)
    )
    if not whole or any(
        (tokens - 1) * step >= side for step, side, tokens in zip(patch, sides, grid, strict=True)
    ):
        raise ValueError(
            "patch must be (rows, columns) of pixels from token to token, whole numbers of at least"
            f" 1 that leave the last token a pixel, got {patch} for images {list(sides)} and maps "
            f"{list(grid)}"
        )


def picture_patch(
    patch: Sequence[int] | None, sides: Sequence[int], grid: Sequence[int]
) -> Sequence[int]:
    """The step in a picture of tokens: as given, or the smallest that covers the image.

    The smallest is the model's own unless it pads a side by as many pixels as tokens or more.

    Raises:
        ValueError: a token has no pixel with it.
    """
    if patch is None:
        patch = tuple(-(-side // tokens) for side, tokens in zip(sides, grid, strict=True))
    check_patch(patch, sides, grid)
    return patch


def padded(images: Tensor, grid: Sequence[int], patch: Sequence[int]) -> Tensor:
    """Images [..., H, W] with black right and bottom where the last tokens lack pixels."""
    rows, columns = (
        max(step * tokens - side, 0)
        for side, tokens, step in zip(images.shape[-2:], grid, patch, strict=True)
    )
    return F.pad(images, (0, columns, 0, rows))


def spread(maps: Tensor, sides: Sequence[int], patch: Sequence[int]) -> Tensor:
    """Each token's number at all of its pixels: [B, h, w] → [B, H, W]."""
    for dim, side, step in zip((1, 2), sides, patch, strict=True):
        pixels = torch.arange(side, dtype=torch.int64, device=maps.device)
        tokens = pixels.div(step, rounding_mode="floor").clamp_max(maps.shape[dim] - 1)
        maps = maps.index_select(dim, tokens)
    return maps


def drawn_proportion(sides: Sequence[int]) -> float:
    """Return height over width of a picture's place in a figure, given the picture's H and W.

    It is the picture's own, but from 1/8 to 8: a figure as long as a narrow picture would take all
    memory.
    """
    height, width = sides
    return min(max(height / width, 1 / _LONGEST), _LONGEST)
