"""Token norms of a sweep's trained models: outliers in every block, and maps of a few images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vision_ttt.data import ImageError
from vision_ttt.engine.train import TrainResult
from vision_ttt.explain.token_norms import largest_over_median, outlier_share, token_norms

SHOWN = (0, 1, 2, 3)
"""Places of the test images whose maps are kept."""

_AT_ONCE = 100  # images


def measure_norms(trained: TrainResult) -> dict[str, Any]:
    """Examine the token norms of a trained model on all of its test images.

    Returns:
        "outlier_share" and "largest_over_median": a mean over the images for each block; "maps":
        for each image of SHOWN the norms after the last block over their median, as rows of the
        token grid.
    """
    norms = torch.cat([_norms(trained, places) for places in _batches(trained)])
    last = norms[list(SHOWN), -1]  # [images, h, w]
    maps = last / last.flatten(1).median(dim=1).values[:, None, None]
    return {
        "outlier_share": _rounded(outlier_share(norms).mean(0)),
        "largest_over_median": _rounded(largest_over_median(norms).mean(0)),
        "maps": _rounded(maps, 3),
    }


def _batches(trained: TrainResult) -> list[range]:
    count = len(trained.task.test_set)
    return [range(first, min(first + _AT_ONCE, count)) for first in range(0, count, _AT_ONCE)]


def _norms(trained: TrainResult, places: range) -> Tensor:
    """Norms [B, layers, h, w] of the test images at some places.

    Raises:
        ImageError: one of them cannot be read.
    """
    images = [trained.task.test_set[place][0] for place in places]
    for image in images:
        if isinstance(image, ImageError):
            raise image
    device = next(trained.model.parameters()).device
    return token_norms(trained.model, torch.stack(images).to(device)).cpu()


def _rounded(values: Tensor, digits: int = 5) -> Any:
    """Nested lists of numbers with so many significant digits."""
    if values.ndim:
        return [_rounded(value, digits) for value in values]
    return float(f"{values.item():.{digits}g}")
