"""Logits of an image by a model that sees windows of it, averaged where they overlap."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_MOST_LOGITS = 2**26
"""Logits that one forward pass may make, where it has more than one window: 256 MiB."""


def window_places(length: int, window: int, stride: int) -> list[int]:
    """Return where windows begin along a side of `length` pixels.

    They are `stride` apart but for the last, which ends at the side's end; a side that is shorter
    than a window has one.
    """
    if length <= window:
        return [0]
    places = range(0, length - window, stride)
    return [*places, length - window]


def sliding_logits(
    segmenter: Callable[[Tensor], Tensor],
    image: Tensor,
    *,
    num_classes: int,
    window: int,
    stride: int,
) -> Tensor:
    """Return the logits [C, H, W] float32 of an image [3, H, W], the mean over its windows.

    An image smaller than a window is padded with 0, the mean colour of normalised images, at the
    right and below, and the logits there are left out. Needs memory for C logits per pixel of the
    image, and for those of the windows of one forward pass.

    Args:
        segmenter: images [B, 3, w, w] → logits [B, C, w, w].
        num_classes: C.
        window: side of the square windows in pixels.
        stride: from one window to the next, at most `window`.

    Raises:
        ValueError: windows further apart than they are long would leave pixels out.
    """
    if not 1 <= stride <= window:
        raise ValueError(f"stride is {stride}; it must be from 1 to window ({window})")
    height, width = image.shape[-2:]
    image = F.pad(image, (0, max(window - width, 0), 0, max(window - height, 0)))
    rows = window_places(height, window, stride)
    columns = window_places(width, window, stride)
    places = [(top, left) for top in rows for left in columns]
    total = image.new_zeros(num_classes, *image.shape[-2:], dtype=torch.float32)
    count = image.new_zeros(image.shape[-2:], dtype=torch.float32)
    at_once = max(_MOST_LOGITS // (num_classes * window**2), 1)
    for start in range(0, len(places), at_once):
        some = places[start : start + at_once]
        windows = torch.stack([image[:, y : y + window, x : x + window] for y, x in some])
        for (y, x), logits in zip(some, segmenter(windows), strict=True):
            total[:, y : y + window, x : x + window] += logits
            count[y : y + window, x : x + window] += 1
    return (total / count)[:, :height, :width]
