"""Logits of an image, whole or by windows, and at another size, a band of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_ttt.engine.evaluation import autocast

_MOST_IN_WINDOWS = 2**26
"""Logits that one forward pass may make, where it has more than one window: 256 MiB."""
_MOST_IN_BAND = 2**24
"""Logits of a band: 64 MiB."""


@dataclass(frozen=True)
class TestView:
    """What of an image the model is given at once; the fields are `SegmentationData`'s."""

    __test__ = False  # nothing that pytest collects

    evaluation: str
    """"whole" or "slide"."""
    window: int
    stride: int

    def segment(
        self, model: nn.Module, num_classes: int, precision: str
    ) -> Callable[[Tensor], Tensor]:
        """Return what makes an image [3, h, w] into its logits [C, h, w] float32."""

        def logits_of(images: Tensor) -> Tensor:
            with autocast(images.device, precision):
                return model(images).float()

        def whole(image: Tensor) -> Tensor:
            return logits_of(image[None])[0]

        def slide(image: Tensor) -> Tensor:
            return sliding_logits(
                logits_of, image, num_classes=num_classes, window=self.window, stride=self.stride
            )

        return torch.inference_mode()(slide if self.evaluation == "slide" else whole)


def window_places(length: int, window: int, stride: int) -> list[int]:
    """Return where windows begin along a side of `length` pixels.

    They are `stride` apart but for the last, which ends at the side's end; a side that is shorter
    than a window has one.
    """
    if length <= window:
        return [0]
    return [*range(0, length - window, stride), length - window]


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
    at_once = max(_MOST_IN_WINDOWS // (num_classes * window**2), 1)
    for start in range(0, len(places), at_once):
        some = places[start : start + at_once]
        windows = torch.stack([image[:, y : y + window, x : x + window] for y, x in some])
        for (y, x), logits in zip(some, segmenter(windows), strict=True):
            total[:, y : y + window, x : x + window] += logits
            count[y : y + window, x : x + window] += 1
    return (total / count)[:, :height, :width]


def resized_bands(logits: Tensor, size: tuple[int, int]) -> Iterator[tuple[slice, Tensor]]:
    """Yield logits [C, h, w], resized bilinearly to H × W, in bands of rows from top to bottom.

    Together the bands are what `F.interpolate(…, align_corners=False)` returns, up to rounding:
    bilinear interpolation goes along one axis after the other.

    Yields:
        The rows of the band, and its logits [C, rows, W] float32.
    """
    (classes, own_height, own_width), (height, width) = logits.shape, size
    step = max(_MOST_IN_BAND // (classes * max(width, own_width)), 1)
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
