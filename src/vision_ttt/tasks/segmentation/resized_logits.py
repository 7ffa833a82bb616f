"""Logits at the size of a mask, a band of rows at a time: whole, they may not fit into memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

_MOST_LOGITS = 2**24
"""Logits of a band: 64 MiB."""


def resized_bands(logits: Tensor, size: tuple[int, int]) -> Iterator[tuple[slice, Tensor]]:
    """Yield logits [C, h, w], resized bilinearly to H × W, in bands of rows from top to bottom.

    Together the bands are what `F.interpolate(…, align_corners=False)` returns, up to rounding:
    bilinear interpolation goes along one axis after the other.

    Yields:
        The rows of the band, and its logits [C, rows, W] float32.
    """
    (classes, own_height, own_width), (height, width) = logits.shape, size
    step = max(_MOST_LOGITS // (classes * max(width, own_width)), 1)
    centres = (torch.arange(height, device=logits.device) + 0.5) * (own_height / height) - 0.5
    centres = centres.clamp(0, own_height - 1)
    above = centres.floor().long()
    below = (above + 1).clamp(max=own_height - 1)
    share = (centres - above).view(1, -1, 1)
    for start in range(0, height, step):
        rows = slice(start, min(start + step, height))
        band = torch.lerp(
            logits[:, above[rows]].float(), logits[:, below[rows]].float(), share[:, rows]
        )
        if width != own_width:
            shape = (band.shape[1], width)
            band = F.interpolate(band[None], shape, mode="bilinear", align_corners=False)[0]
        yield rows, band


def predicted_labels(logits: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the most probable class [H, W] int64 of each pixel of an image of that size.

    Raises:
        ValueError: a logit is not finite.
    """
    parts = []
    for _, band in resized_bands(logits, size):
        if not torch.isfinite(band).all():
            raise ValueError("a logit is not finite")
        parts.append(band.argmax(dim=0))
    return torch.cat(parts)
