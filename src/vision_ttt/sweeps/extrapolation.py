"""A segmenter of letters on larger pictures than it was trained on, its positions interpolated."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from vision_ttt.data import SeededItems
from vision_ttt.data.letters import LetterImages
from vision_ttt.tasks.segmentation.evaluation import SegmentationEvaluation, measured
from vision_ttt.tasks.segmentation.transforms import TestTransform

if TYPE_CHECKING:
    from vision_ttt.tasks.segmentation.task import Segmentation

FACTORS = (2, 4)
"""Sides of the pictures, in sides of those that the model was trained on."""
LARGEST = 2048
"""Side, in pixels: each doubling is 16 times the attention."""


def measure_larger(model: nn.Module, task: Segmentation) -> dict[str, float]:
    """Return the mean IoU on pictures of twice and four times the side, by factor: "2", "4".

    Letters and mark keep their sizes: larger pictures have more letters, and about as many of them
    are tested. Factors that would exceed `LARGEST` are left out.

    Args:
        model: in evaluation mode; accepts any image size.
        task: whose test pictures are letters.
    """
    own: LetterImages = task.test
    segment = task.view.segment(model, len(task.classes), task.precision)
    found = {}
    for factor in FACTORS:
        side = factor * own.settings.side
        if side > LARGEST:
            continue
        pictures = replace(
            own,
            settings=replace(own.settings, side=side, mark=own.settings.mark_side),
            images=max(own.images // factor**2, 1),
        )
        items = SeededItems(pictures, TestTransform(task.statistics, side, side))
        counts = torch.zeros(3, len(task.classes), dtype=torch.int64)
        loss = 0.0
        for index in range(len(pictures)):
            item = items[index]
            own_counts, own_loss = measured(segment(item.image), item.labels)
            counts += own_counts
            loss += own_loss.item()
        pixels = len(pictures) * side**2
        found[str(factor)] = SegmentationEvaluation(*counts, loss / pixels, len(pictures)).miou
    return found
