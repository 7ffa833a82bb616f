"""A picture of some scenes above their classes, to look at."""

from __future__ import annotations

import numpy as np
from PIL import Image

from vision_ttt.data.contact_sheet import labelled_sheet
from vision_ttt.data.mask_folders import LabelledImage
from vision_ttt.data.scene_annotations import ade_mask
from vision_ttt.data.scene_images import Split, render_scene


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
    scenes = (render_scene(seed, split, index, side) for index in range(rows * columns))
    pictures = [LabelledImage(scene.image, np.asarray(ade_mask(scene))) for scene in scenes]
    return labelled_sheet(pictures, colours, columns)
