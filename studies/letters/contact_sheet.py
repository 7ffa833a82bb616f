"""A picture of labelled pictures, to look at."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image

from vision_ttt.data.mask_folders import LabelledImage

_GAP = 4  # pixels


def labelled_sheet(
    pictures: Sequence[LabelledImage], colours: Sequence[tuple[int, int, int]], columns: int
) -> Image.Image:
    """Return pictures of one size in rows, and below each the classes of its pixels.

    Args:
        colours: of the labels, from 0.
        columns: pictures in a row.
    """
    width, height = (side + _GAP for side in pictures[0].image.size)
    rows = -(-len(pictures) // columns)
    sheet = Image.new("RGB", (columns * width - _GAP, 2 * rows * height - _GAP), "white")
    table = np.array(colours, dtype=np.uint8)
    for index, (image, labels) in enumerate(pictures):
        row, column = divmod(index, columns)
        sheet.paste(image, (column * width, 2 * row * height))
        sheet.paste(Image.fromarray(table[labels]), (column * width, (2 * row + 1) * height))
    return sheet
