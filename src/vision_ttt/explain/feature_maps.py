"""Feature maps of any backbone that follows timm's contract: one per block or stage."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


def check_images(images: Tensor) -> None:
    """Check that images are a batch.

    Raises:
        ValueError: they are not [B, C, H, W] of at least one image in floating point.
    """
    if images.ndim != 4 or not len(images) or not images.is_floating_point():
        raise ValueError(
            "images must be [B, C, H, W] in floating point with B of at least 1, got "
            f"{list(images.shape)} of {images.dtype}"
        )


def feature_maps(model: nn.Module, images: Tensor, *, last: bool = False) -> list[Tensor]:
    """The features after every block or stage, or after the last alone, as maps [B, D, h, w].

    They are the residual stream itself: no final norm is applied, and class tokens and registers
    are left out.

    Args:
        model: any with timm's ``forward_intermediates``: every backbone of this package, timm's
            VisionTransformer, ResNet and most others.
        images: [B, C, H, W], normalised as for the model.
        last: return the last map only.

    Raises:
        TypeError: the model does not have the method.
        ValueError: the images do not fit the model.
    """
    if not hasattr(model, "forward_intermediates"):
        raise TypeError(
            "feature maps need a backbone with forward_intermediates (those of vision_ttt and most "
            f"of timm have it), got {type(model).__name__}"
        )
    check_images(images)
    with assertions_as_errors():
        return model.forward_intermediates(
            images, indices=1 if last else None, output_fmt="NCHW", intermediates_only=True
        )


@contextmanager
def assertions_as_errors() -> Iterator[None]:
    """Raise a ValueError where a model of timm, which checks sizes by assertions, fails one."""
    try:
        yield
    except AssertionError as error:
        raise ValueError(f"the images do not fit the model: {error}") from error


def token_grid(model: nn.Module, images: Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
    """The grid of the tokens that a backbone ends with, and the pixels from token to token.

    Returns:
        (h, w) and (rows, columns of pixels). The last token of a padded side has fewer pixels.

    Raises:
        TypeError: the model says neither its patches nor the reduction of its last stage.
        ValueError: the images are not [B, C, H, W].
    """
    check_images(images)
    grids = _grids(model, images)
    if not grids:
        raise TypeError(
            "the token grid is known of backbones with patch_embed and blocks or with timm's "
            f"feature_info, got {type(model).__name__}"
        )
    return grids[-1]


def token_step(model: nn.Module, images: Tensor, grid: tuple[int, int]) -> tuple[int, int] | None:
    """Rows and columns of pixels from token to token of maps on one of a backbone's grids.

    Args:
        model: any.
        images: [B, C, H, W], of which the maps are.
        grid: (h, w) of the maps, of the last stage or an earlier one.

    Returns:
        None where the model does not say: it has no such grid, or none that is known.

    Raises:
        ValueError: the images are not [B, C, H, W].
    """
    check_images(images)
    return next((step for own, step in reversed(_grids(model, images)) if own == grid), None)


def _grids(model: nn.Module, images: Tensor) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """(h, w) and the pixels from token to token of every stage; none where they are not known."""
    height, width = images.shape[-2:]
    patches = getattr(model, "patch_embed", None)
    if hasattr(patches, "dynamic_feat_size") and hasattr(model, "blocks"):
        rows, columns = patches.dynamic_feat_size((height, width))
        return [((rows, columns), tuple(patches.feat_ratio(as_scalar=False)))]
    steps = [info["reduction"] for info in getattr(model, "feature_info", None) or ()]
    return [((math.ceil(height / step), math.ceil(width / step)), (step, step)) for step in steps]
