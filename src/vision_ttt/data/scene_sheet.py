"""A picture of some scenes beside their classes, to look at."""

from __future__ import annotations

import numpy as np
from PIL import Image

from vision_ttt.data.scene_annotations import ade_mask
from vision_ttt.data.scene_images import Split, render_scene

_GAP = 4  # pixels


def contact_sheet(
    seed: int,
    split: Split,
    side: int,
    colours: list[tuple[int, int, int]],
    rows: int = 4,
    columns: int = 6,
) -> Image.Image:
    """Return the first scenes of a split, and below each the classes of its pixels.

    Args:
        colours: of the values of ADE-style masks, from 0.
    """
    step = side + _GAP
    sheet = Image.new("RGB", (columns * step - _GAP, 2 * rows * step - _GAP), "white")
    table = np.array(colours, dtype=np.uint8)
    for index in range(rows * columns):
        scene = render_scene(seed, split, index, side)
        row, column = divmod(index, columns)
        classes = Image.fromarray(table[np.asarray(ade_mask(scene))])
        sheet.paste(scene.image, (column * step, 2 * row * step))
        sheet.paste(classes, (column * step, (2 * row + 1) * step))
    return sheet
