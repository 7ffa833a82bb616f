"""Samples as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from matplotlib.font_manager import findfont
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor
from torchvision.utils import make_grid

from vision_ttt.tasks.images.models import denormalise
from vision_ttt.tasks.images.pictures import as_png, shortened

_SHOWN_WIDTH = 48  # pixels that a small image is magnified to in a grid, at least about
_LONGEST = 12  # times its height, is how long a label may be
CENTRED = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
"""Statistics of pixels from -1 to 1, as autoencoders expect and return them."""


def to_pixels(samples: Tensor, statistics: Mapping[str, Sequence[float]]) -> Tensor:
    """Return the pixels [..., 3, H, W] uint8 of samples that are normalised with `statistics`."""
    return (denormalise(samples, statistics) * 255).round().to(torch.uint8)


def to_png(pixels: Tensor) -> bytes:
    """The content of a PNG file of pixels [3, H, W] uint8."""
    return as_png(Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()))


def grid(pixels: Tensor, columns: int, labels: Sequence[str] = ()) -> Tensor:
    """One image [3, H', W'] of images [N, 3, H, W] uint8, row by row, small ones magnified.

    Args:
        pixels: the images.
        columns: images in a row.
        labels: what stands at the left of each row; none for no labels.

    Raises:
        ValueError: there are labels, but not one for each row.
    """
    zoom = max(1, _SHOWN_WIDTH // pixels.shape[-1])
    large = pixels.repeat_interleave(zoom, dim=2).repeat_interleave(zoom, dim=3)
    picture = make_grid(large, nrow=columns, padding=2, pad_value=255)
    if not labels:
        return picture
    rows = -(-len(pixels) // columns)
    if len(labels) != rows:
        raise ValueError(f"there must be a label for each of {rows} rows, got {len(labels)}")
    return torch.cat((_label_column(labels, picture.shape[1]), picture), dim=2)


def _label_column(labels: Sequence[str], height: int) -> Tensor:
    """The labels one below the other, each in the middle of its row: [3, height, W] uint8."""
    row = height / len(labels)
    size = max(14, round(row / 8))
    font = ImageFont.truetype(findfont("DejaVu Sans"), size)  # matplotlib brings it along
    shown = [shortened(label, font, _LONGEST * size) for label in labels]
    width = round(max(map(font.getlength, shown))) + size
    column = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(column)
    for number, label in enumerate(shown):
        place = (width - size // 2, (number + 0.5) * row)
        draw.text(place, label, fill="black", font=font, anchor="rm")
    return pil_to_tensor(column)
