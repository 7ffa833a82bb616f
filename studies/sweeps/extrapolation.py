"""A segmenter of letters on larger pictures than it was trained on, its positions interpolated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.data import Dataset, Subset

from studies.letters.dataset import LetterImages
from studies.letters.images import INKS
from vision_ttt.data import SeededItems
from vision_ttt.data.mask_folders import LabelledImage
from vision_ttt.tasks.segmentation.evaluation import SegmentationEvaluation, measured
from vision_ttt.tasks.segmentation.transforms import TestTransform

if TYPE_CHECKING:
    from vision_ttt.tasks.segmentation.task import Segmentation

FACTORS = (2, 4, 8)
"""Sides of the pictures, in sides of those that the model was trained on."""
LARGEST = 2048
"""Side, in pixels: each doubling is 16 times the attention."""

_CORNERS = 4


def measure_larger(
    model: nn.Module, task: Segmentation, factors: Sequence[int] = FACTORS
) -> dict[str, float]:
    """Return the mean IoU on pictures of so many times the side, by factor: "2", "4", "8".

    Letters and mark keep their sizes: larger pictures have more letters, and about as many of them
    are tested, on four pictures at least. The mark is in each corner, and of each ink, equally
    often. Factors that would exceed `LARGEST` are left out.

    Args:
        model: in evaluation mode; accepts any image size.
        task: whose test pictures are letters.
        factors: whole numbers.
    """
    own: LetterImages = task.parts["test"]
    found = {}
    for factor in factors:
        side = factor * own.settings.side
        if side > LARGEST:
            continue
        settings = replace(own.settings, side=side, mark=own.settings.mark_side)
        pictures = balanced(replace(own, settings=settings), own.images // factor**2)
        found[str(factor)] = mean_iou(model, task, pictures, side)
    return found


def mean_iou(
    model: nn.Module, task: Segmentation, pictures: Dataset[LabelledImage], side: int
) -> float:
    """Return the mean IoU of a segmenter on pictures of a side that may be another than its own."""
    segment = task.view.segment(model, len(task.classes), task.precision)
    items = SeededItems(pictures, TestTransform(task.statistics, side, side))
    counts = torch.zeros(3, len(task.classes), dtype=torch.int64)
    loss = 0.0
    for index in range(len(pictures)):
        item = items[index]
        with torch.inference_mode():
            own_counts, own_loss = measured(segment(item.image), item.labels)
        counts += own_counts
        loss += own_loss.item()
    pixels = len(pictures) * side**2
    return SegmentationEvaluation(*counts, loss / pixels, len(pictures)).metrics["miou"]


def balanced(pictures: LetterImages, images: int) -> Subset:
    """Return the first pictures whose marks are in each corner, and of each ink, equally often.

    Args:
        pictures: of which the settings and the split are asked; there is no last one.
        images: how many, rounded down to a multiple of the corners, of which one is the least.
    """
    each = max(images // _CORNERS, 1)
    corners: Counter[tuple[bool, ...]] = Counter()
    inks: Counter[int] = Counter()
    chosen: list[int] = []
    for index in count():
        picture = pictures.picture(index)
        middle = pictures.settings.side / 2
        corner, ink = tuple(place > middle for place in picture.mark), picture.ink
        if corners[corner] < each and inks[ink] < _CORNERS * each // len(INKS):
            corners[corner] += 1
            inks[ink] += 1
            chosen.append(index)
        if len(chosen) == _CORNERS * each:
            break
    return Subset(replace(pictures, images=chosen[-1] + 1), chosen)
