"""A picture of some pictures of letters above their labels, to look at."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image

from studies.letters.contact_sheet import labelled_sheet
from studies.letters.fonts import SPLITS
from studies.letters.images import LetterSettings, render_letters
from vision_ttt.data.mask_folders import LabelledImage

_WIDTH = 1024  # pixels, about that of the sheet
_MOST_COLUMNS = 6


def letter_sheet(settings: LetterSettings, colours: Sequence[tuple[int, int, int]]) -> Image.Image:
    """Return the first pictures of each split in a row, and below each its labels.

    Pictures larger than 1024² pixels are shown smaller.

    Args:
        colours: of the labels, from 0.
    """
    smaller = -(-settings.side // _WIDTH)
    columns = min(max(_WIDTH // settings.side, 1), _MOST_COLUMNS)
    pictures = []
    for split in SPLITS:
        for index in range(columns):
            picture = render_letters(settings, split, index)
            labels = picture.labels()[::smaller, ::smaller]
            pictures.append(LabelledImage(picture.image.reduce(smaller), labels))
    return labelled_sheet(pictures, colours, columns)
