"""Images with the objects that are in them, or are found in them, drawn on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import faster_coco_eval.core.mask as rle_masks
import numpy as np
import torch
from matplotlib.font_manager import findfont
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor, to_pil_image
from torchvision.utils import draw_bounding_boxes

from vision_ttt.data.coco_checks import Rle
from vision_ttt.tasks.images.pictures import Colour, with_legend

SHOWN_SCORE = 0.5
"""Least score of an object that is drawn; a detector returns many below."""
_STRENGTH = 0.45  # of a mask's colour over the image
_SMALLEST, _LARGEST = 10, 24  # pixels of the tags' letters
_LEAST_SIDE = 640  # pixels that a picture's longer side is enlarged to, for the tags' sake


class DrawnObject(NamedTuple):
    """An object of an image of height H and width W."""

    label: int
    """Of its class, from 1."""
    box: Sequence[float]
    """Corners x, y, x, y in pixels."""
    mask: Rle
    """Of size [H, W]."""
    score: float | None = None
    """From 0 to 1; None for one that is known."""


def drawn(
    image: Image.Image,
    objects: Sequence[DrawnObject],
    classes: Sequence[str],
    colours: Sequence[Colour],
    *,
    longer_side: int | None = None,
) -> Image.Image:
    """Return an RGB copy of an image with its objects' masks, boxes and classes.

    Args:
        image: RGB, as large as the masks.
        objects: the first one is drawn on top.
        classes: names, of the labels from 1.
        colours: theirs.
        longer_side: of the copy in pixels; None: as the image is.
    """
    ordered = list(reversed(objects))
    pixels = np.array(image.convert("RGB"))
    for each in ordered:
        held = rle_masks.decode(each.mask).astype(bool)
        colour = np.array(colours[each.label - 1])
        pixels[held] = ((1 - _STRENGTH) * pixels[held] + _STRENGTH * colour).round()
    scale = 1.0 if longer_side is None else longer_side / max(image.size)
    width, height = (max(round(side * scale), 1) for side in image.size)
    picture = Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)
    if not ordered:
        return picture
    names = [classes[each.label - 1] for each in ordered]
    scores = ["" if each.score is None else f" {each.score:.0%}" for each in ordered]
    own = [colours[each.label - 1] for each in ordered]
    # Black on light colours, white on dark ones, by the weights of ITU-R BT.601.
    light = [0.299 * red + 0.587 * green + 0.114 * blue > 128 for red, green, blue in own]
    size = min(max(min(picture.size) // 32, _SMALLEST), _LARGEST)
    shown = draw_bounding_boxes(
        pil_to_tensor(picture),
        torch.tensor([each.box for each in ordered], dtype=torch.float32) * scale,
        labels=[name + score for name, score in zip(names, scores, strict=True)],
        colors=own,
        width=max(size // 6, 2),
        font=findfont("DejaVu Sans"),
        font_size=size,
        label_colors=["black" if each else "white" for each in light],
        label_background_colors=own,
        fill_labels=True,
    )
    return to_pil_image(shown)


def drawn_with_legend(
    image: Image.Image,
    objects: Sequence[DrawnObject],
    classes: Sequence[str],
    colours: Sequence[Colour],
) -> Image.Image:
    """Return the same with a legend: how many objects of which class, most first.

    Small images are enlarged to a longer side of 640 pixels.
    """
    counts = Counter(each.label for each in objects).most_common()
    entries = [(f"{count} {classes[label - 1]}", colours[label - 1]) for label, count in counts]
    side = max(*image.size, _LEAST_SIDE)
    return with_legend(drawn(image, objects, classes, colours, longer_side=side), entries)


def corners(box: Sequence[float]) -> tuple[float, float, float, float]:
    """Return a box x, y, width, height as corners x, y, x, y."""
    x, y, width, height = box
    return x, y, x + width, y + height
