"""What is on a scene in COCO's and in ADE20K's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import contourpy
import numpy as np
from PIL import Image

from vision_ttt.data.scene_images import Instance, Scene
from vision_ttt.data.scene_shapes import CLASSES

BACKGROUND = 1
"""The background's value in ADE-style masks, where 0 is what no class is given to."""
ADE_CLASSES = ("background", *(each.name for each in CLASSES))
"""The classes of the ADE-style masks by value, from 1."""


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


def coco_file(
    images: Sequence[Mapping[str, Any]],
    annotations: Sequence[Mapping[str, Any]],
    description: str,
) -> dict[str, Any]:
    """Return the content of a COCO file of instances."""
    return {
        "info": {
            "description": description,
            "url": "",
            "version": "1.0",
            "year": 2026,
            "contributor": "vision-ttt",
            "date_created": "2026/01/01",
        },
        "licenses": [{"id": 1, "name": "Apache License 2.0", "url": ""}],
        "images": list(images),
        "annotations": list(annotations),
        "categories": [
            {"id": each.category, "name": each.name, "supercategory": each.supercategory}
            for each in CLASSES
        ],
    }


def ade_mask(scene: Scene) -> Image.Image:
    """Return the class of each pixel: 0 of an object that is not annotated, else from 1."""
    values = np.full(scene.unlabelled.shape, BACKGROUND, dtype=np.uint8)
    values[scene.unlabelled] = 0
    for instance in scene.instances:
        values[instance.mask] = BACKGROUND + 1 + instance.label
    return Image.fromarray(values)


def polygons(mask: np.ndarray) -> list[list[float]] | None:
    """Return the outlines of a mask, [x, y, x, y, …] in pixels each; None where it has a hole.

    They run through the middles of the pixels' edges: every pixel's middle lies on the side that
    the mask says.

    Args:
        mask: bool [H, W].
    """
    framed = np.pad(mask, 1).astype(np.float32)
    contours = contourpy.contour_generator(
        z=framed, fill_type=contourpy.FillType.OuterOffset
    ).filled(0.5, 2)
    outlines = []
    for points, offsets in zip(*contours, strict=True):
        if len(offsets) > 2:
            return None
        # The frame shifts places by 1, and the middle of the first pixel is at 0.5.
        corners = points[:-1].astype(np.float64) - 0.5
        steps = corners - np.roll(corners, 1, axis=0)
        following = np.roll(steps, -1, axis=0)
        bends = steps[:, 0] * following[:, 1] != steps[:, 1] * following[:, 0]
        outlines.append(corners[bends].ravel().tolist())
    return outlines


def run_lengths(mask: np.ndarray) -> dict[str, Any]:
    """Return a mask [H, W] in COCO's run-length encoding, not compressed.

    The lengths of runs of 0 and 1 take turns, column by column, and begin with one of 0.
    """
    values = mask.ravel(order="F")
    changes = np.flatnonzero(np.diff(values)) + 1
    counts = np.diff([0, *changes, values.size]).tolist()
    return {"counts": [0, *counts] if values[0] else counts, "size": list(mask.shape)}
