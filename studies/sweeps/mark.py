"""Whether the labels of a segmenter depend on a distant mark, by the distance from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from studies.letters.dataset import LetterImages
from studies.letters.images import BACKGROUND, Letter, fill_outline

if TYPE_CHECKING:
    from vision_ttt.tasks.segmentation.task import Segmentation

BAND = 128
"""Pixels from the mark in a band of distances."""


def measure_mark(model: nn.Module, task: Segmentation) -> dict[str, Any]:
    """Return how many letters a model shows and hides as the mark says, by their distance from it.

    A letter is shown where most pixels of its hull are given another class than the background's.
    A letter is correct by the mark if it counts and is shown, or does not count and is hidden.

    Args:
        model: in evaluation mode.
        task: whose test pictures are letters.

    Returns:
        "obeyed", the mean of the shares of letters that count and are shown, and of those that do
        not and are hidden: 0.5 for a model that cannot see the mark, or shows nothing; "named", the
        share of letters that count and whose class most pixels of the hull are given; "bands", for
        each 128 pixels of distance the numbers of letters that "count", of these "shown", of
        letters that do "not_count", of these "hidden".

    Raises:
        TypeError: the test pictures are others.
    """
    pictures = task.parts["test"]
    if not isinstance(pictures, LetterImages):
        raise TypeError(f"the test pictures are {type(pictures).__name__}, not LetterImages")
    segment = task.view.segment(model, len(task.classes), task.precision)
    side = pictures.settings.side
    bands = np.zeros((int(np.sqrt(2) * side) // BAND + 1, 4), dtype=np.int64)
    named = 0
    for index in range(len(pictures)):
        shown = segment(task.test_set[index].image).argmax(dim=0).to(torch.uint8).numpy()
        for letter in pictures.picture(index).letters:
            own = shown[_hull(letter, side)]
            is_shown = (own != BACKGROUND).mean() > 0.5
            obeyed = is_shown if letter.counts else not is_shown
            kind = 0 if letter.counts else 2
            bands[int(letter.distance) // BAND, kind : kind + 2] += (1, obeyed)
            named += bool(letter.counts and (own == letter.label + 1).mean() > 0.5)
    count, shown, rest, hidden = bands.sum(axis=0).tolist()
    names = ("count", "shown", "not_count", "hidden")
    return {
        "obeyed": (shown / max(count, 1) + hidden / max(rest, 1)) / 2,
        "named": named / max(count, 1),
        "bands": [dict(zip(names, row, strict=True)) for row in bands.tolist()],
    }


def _hull(letter: Letter, side: int) -> np.ndarray:
    """The pixels of a letter's hull, bool [H, W]."""
    canvas = Image.new("L", (side, side))
    fill_outline(canvas, letter, 255)
    return np.asarray(canvas) > 0
