"""Samples as pictures."""

from __future__ import annotations

import io
from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor
from torchvision.utils import make_grid

_SHOWN_WIDTH = 48  # pixels that a small image is magnified to in a grid, at least about


def to_pixels(samples: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Grey levels [N, 3, H, W] uint8 of samples as a model was trained on them.

    Args:
        samples: [N, 3, H, W], normalised with ``mean`` and ``std``.
        mean: of each channel, of levels from 0 to 1.
        std: likewise.
    """
    shape = (1, -1, 1, 1)
    levels = samples * samples.new_tensor(std).view(shape) + samples.new_tensor(mean).view(shape)
    return (levels.clamp(0, 1) * 255).round().to(torch.uint8)


def to_png(pixels: Tensor) -> bytes:
    """The content of a PNG file of pixels [3, H, W] uint8."""
    buffer = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()).save(buffer, format="png")
    return buffer.getvalue()


def grid(pixels: Tensor, columns: int) -> Tensor:
    """One image [3, H', W'] of images [N, 3, H, W] uint8, row by row, small ones magnified.

    Args:
        pixels: the images.
        columns: images in a row.
    """
    zoom = max(1, _SHOWN_WIDTH // pixels.shape[-1])
    large = pixels.repeat_interleave(zoom, dim=2).repeat_interleave(zoom, dim=3)
    return make_grid(large, nrow=columns, padding=2, pad_value=255)
