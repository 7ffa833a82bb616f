"""What is on a scene in COCO's and in ADE20K's format."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

from vision_ttt.data.annotation_files import polygons, run_lengths
from vision_ttt.data.scene_images import Instance, Scene
from vision_ttt.data.scene_shapes import CLASSES

BACKGROUND = 1
"""The background's value in ADE-style masks, where 0 is what no class is given to."""
ADE_CLASSES = ("background", *(each.name for each in CLASSES))
"""The classes of the ADE-style masks by value, from 1."""
CATEGORIES = tuple(
    {"id": each.category, "name": each.name, "supercategory": each.supercategory}
    for each in CLASSES
)
"""The classes as COCO's files have them."""


def coco_annotation(instance: Instance, number: int, image: int) -> dict[str, Any]:
    """Return an instance as an annotation of a COCO file.

    A mask without holes is stored as polygons, which COCO's rasterisation turns into the same
    pixels; COCO's polygons have no holes, so that others are stored as run lengths, and crowds are.

    Args:
        number: the annotation's id.
        image: the image's id.
    """
    mask = instance.mask
    outlines = None if instance.is_crowd else polygons(mask)
    rows, columns = (np.flatnonzero(mask.any(axis=axis)) for axis in (1, 0))
    left, top = int(columns[0]), int(rows[0])
    box = [left, top, int(columns[-1]) + 1 - left, int(rows[-1]) + 1 - top]
    return {
        "id": number,
        "image_id": image,
        "category_id": CLASSES[instance.label].category,
        "segmentation": run_lengths(mask) if outlines is None else outlines,
        "area": int(mask.sum()),
        "bbox": box,
        "iscrowd": int(instance.is_crowd),
    }


def ade_mask(scene: Scene) -> Image.Image:
    """Return the class of each pixel: 0 of an object that is not annotated, else from 1."""
    values = np.full(scene.unlabelled.shape, BACKGROUND, dtype=np.uint8)
    values[scene.unlabelled] = 0
    for instance in scene.instances:
        values[instance.mask] = BACKGROUND + 1 + instance.label
    return Image.fromarray(values)
