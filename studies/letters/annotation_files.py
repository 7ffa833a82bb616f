"""What is on rendered pictures, in the files that COCO and ADE20K have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import contourpy
import numpy as np

from studies.letters.rendered_folder import Entries


def coco_file(
    entries: Entries, categories: Sequence[Mapping[str, Any]], description: str
) -> dict[str, Any]:
    """Return the content of a COCO file of instances.

    Args:
        categories: each with its id, name and supercategory.
    """
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
        **entries,
        "categories": list(categories),
    }


def ade_classes(names: Sequence[str]) -> bytes:
    """Return the content of ADE20K's objectInfo150.txt, for classes numbered from 1."""
    lines = ["Idx\tName", *(f"{number}\t{name}" for number, name in enumerate(names, start=1))]
    return "\n".join([*lines, ""]).encode()


def polygons(mask: np.ndarray) -> list[list[float]]:
    """Return the outlines of a mask without holes, [x, y, x, y, …] in pixels each.

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
    for points in contours[0]:
        # The frame shifts places by 1, and the middle of the first pixel is at 0.5.
        corners = points[:-1].astype(np.float64) - 0.5
        steps = corners - np.roll(corners, 1, axis=0)
        following = np.roll(steps, -1, axis=0)
        bends = steps[:, 0] * following[:, 1] != steps[:, 1] * following[:, 0]
        outlines.append(corners[bends].ravel().tolist())
    return outlines
