"""Masks in the colours of their classes, alone and over their images."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image

from vision_ttt.data.mask_folders import IGNORED
from vision_ttt.tasks.images.pictures import Colour, palette

_BACKGROUND = "background"
_GREY: Colour = (128, 128, 128)  # no colour of a palette
_STRENGTH = 0.6  # of the colours over an image


def class_colours(classes: Sequence[str]) -> list[Colour]:
    """Return a colour for each class; grey for the background, before which the others show."""
    colours = zip(classes, palette(len(classes)), strict=True)
    return [_GREY if name == _BACKGROUND else colour for name, colour in colours]


def coloured(labels: np.ndarray, colours: Sequence[Colour]) -> Image.Image:
    """Return class indices [H, W] uint8 as an image whose values are these, with a palette.

    `IGNORED` is black.
    """
    picture = Image.fromarray(np.ascontiguousarray(labels, dtype=np.uint8), mode="L")
    levels = np.zeros((IGNORED + 1, 3), dtype=np.uint8)
    levels[: len(colours)] = colours
    levels[IGNORED] = 0
    picture.putpalette(levels.tobytes(), "RGB")
    return picture


def overlaid(image: Image.Image, labels: np.ndarray, colours: Sequence[Colour]) -> Image.Image:
    """Return an RGB image under the colours of its labels [H, W]; `IGNORED` pixels stay as they
    are."""
    painted = Image.blend(image, coloured(labels, colours).convert("RGB"), _STRENGTH)
    return Image.composite(painted, image, Image.fromarray(labels != IGNORED))
