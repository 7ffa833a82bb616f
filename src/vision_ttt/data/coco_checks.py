"""What a COCO annotation may hold: its box, its mask, and whether they lie within the image."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import faster_coco_eval.core.mask as rle_masks
import numpy as np
from faster_coco_eval.mask_api_new_cpp import toUncompressedRLE as uncompressed

from vision_ttt.errors import shortened

Rle = dict[str, Any]
"""A run-length encoded mask: `size` [height, width] and compressed `counts`, bytes."""

_FARTHEST = 100_000.0  # pixels from the origin; what lies beyond is no coordinate
_LONGEST = 1_000_000.0  # pixels of outline; each takes 40 bytes while a mask is made of it
_LARGEST = 1e10  # square pixels; COCO's evaluation leaves out larger objects
_ROUNDED = 0.01  # pixels; coordinates are written with two digits
_BOX = "[x, y, width, height] in pixels, finite numbers, width and height at least 0"
_POLYGON = "x and y of 3 points or more in turn, finite numbers"
_SEGMENTATION = 'polygons ([[x, y, x, y, …], …]) or an RLE ({"size": [height, width], "counts": …})'


class Checked(NamedTuple):
    """An annotation's content, checked."""

    box: tuple[float, float, float, float]
    """x, y, width and height, as in the file."""
    area: float
    """In square pixels; NaN where the file does not say."""
    crowd: bool
    """Whether it is a region of many objects rather than one."""
    outside: bool
    """Whether a part of it lies outside of the image and is cut off."""


class Fault(ValueError):
    """What is wrong with an annotation; names what came and what is accepted."""


def check_annotation(annotation: Mapping[str, Any], height: int, width: int) -> Checked:
    """Check the box, area, crowd flag and segmentation of an annotation of an image.

    Raises:
        Fault: one of them is none, is of another image's size, or lies wholly outside.
    """
    box, outside = _box(annotation.get("bbox"), height, width)
    crowd = annotation.get("iscrowd", 0)
    if crowd not in (0, 1):
        raise Fault(f"iscrowd is {shown(crowd)}; it must be 0 or 1")
    area = annotation.get("area", 0.0)
    if not _are_finite([area]) or area < 0:
        raise Fault(f"area is {shown(area)}; it must be a finite number of at least 0")
    if area > _LARGEST:
        raise Fault(
            f"area is {shown(area)}; it must be at most {_LARGEST:.0e}, beyond which COCO's"
            " evaluation leaves an object out"
        )
    segmentation = annotation.get("segmentation")
    if isinstance(segmentation, dict):
        _check_rle(segmentation, height, width)
    elif isinstance(segmentation, list) and segmentation:
        outside |= _check_polygons(segmentation, height, width)
    elif segmentation != [] or (box[2] and box[3]):  # a box without area needs no mask
        raise Fault(f"segmentation is {shown(segmentation)}; it must be {_SEGMENTATION}")
    area = float(area) if "area" in annotation else math.nan
    return Checked(box, area, bool(crowd), outside)


def encoded(segmentation: Any, height: int, width: int) -> Rle:
    """Return a checked segmentation as one RLE; an empty list as an empty mask.

    Polygons are cut off at the image's edges.
    """
    if not segmentation:
        segmentation = {"size": [height, width], "counts": [height * width]}
    if isinstance(segmentation, dict):
        if isinstance(segmentation["counts"], list):
            return rle_masks.frPyObjects(segmentation, height, width)
        counts = segmentation["counts"]
        counts = counts.encode() if isinstance(counts, str) else counts
        return {"size": [height, width], "counts": counts}
    return rle_masks.merge(rle_masks.frPyObjects(segmentation, height, width))


def _box(box: Any, height: int, width: int) -> tuple[tuple[float, float, float, float], bool]:
    if not isinstance(box, list) or len(box) != 4 or not _are_finite(box) or min(box[2:]) < 0:
        raise Fault(f"bbox is {shown(box)}; it must be {_BOX}")
    x, y, wide, high = map(float, box)
    if x > width or y > height or x + wide < 0 or y + high < 0:
        raise Fault(
            f"bbox {shown(box)} lies outside of the image; a part of it must lie within"
            f" {width} × {height} pixels (width × height)"
        )
    return (x, y, wide, high), _is_outside(x, y, x + wide, y + high, height, width)


def _check_polygons(polygons: Sequence[Any], height: int, width: int) -> bool:
    """Check polygons, and return whether a part of them lies outside of the image."""
    outside, within = False, False
    length = 0.0
    for polygon in polygons:
        if (
            not isinstance(polygon, list)
            or len(polygon) < 6
            or len(polygon) % 2
            or not _are_finite(polygon)
        ):
            raise Fault(f"a polygon is {shown(polygon)}; it must be {_POLYGON}")
        xs, ys = polygon[::2], polygon[1::2]
        left, top, right, bottom = min(xs), min(ys), max(xs), max(ys)
        if max(-left, -top, right, bottom) > _FARTHEST:
            farthest = max(polygon, key=abs)
            raise Fault(
                f"a polygon has the coordinate {farthest}; coordinates must be within"
                f" ±{_FARTHEST:,.0f} pixels"
            )
        length += len(xs) * max(right - left, bottom - top)
        outside |= _is_outside(left, top, right, bottom, height, width)
        # As for boxes: tools that cut objects off at an edge leave a line on it.
        within |= left <= width and top <= height and right >= 0 and bottom >= 0
    if not within:
        raise Fault(
            f"the polygon {shown(polygons[0])} lies outside of the image; a part of it must lie"
            f" within {width} × {height} pixels (width × height)"
        )
    # That was an upper bound, which few exceed; the outline itself takes longer.
    if length > _LONGEST and (length := sum(map(_outline, polygons))) > _LONGEST:
        raise Fault(
            f"the polygons' outline is {length:,.0f} pixels long; it must be at most"
            f" {_LONGEST:,.0f}"
        )
    return outside


def _outline(polygon: Sequence[float]) -> float:
    """The length of a polygon's edges, of each the longer one of its extents in x and y."""
    points = np.array(polygon, dtype=np.float64).reshape(-1, 2)
    return float(np.abs(points - np.roll(points, 1, axis=0)).max(axis=1).sum())


def _check_rle(segmentation: Mapping[str, Any], height: int, width: int) -> None:
    size, counts = segmentation.get("size"), segmentation.get("counts")
    if size != [height, width]:
        raise Fault(
            f"the RLE's size is {shown(size)}; it must be the image's, [{height}, {width}]"
            " (height, width)"
        )
    if isinstance(counts, str):
        try:
            counts = uncompressed([{"size": size, "counts": counts.encode()}])
        except (ValueError, RuntimeError) as error:  # the library's, on text that is no RLE
            raise Fault(f"the RLE's counts are damaged: {error}") from error
        counts = counts[0]["counts"]
    if (
        not isinstance(counts, list)
        or not all(type(count) is int and count >= 0 for count in counts)
        or sum(counts) != height * width
    ):
        raise Fault(
            f"the RLE's counts are {shown(counts)}; they must be whole numbers of at least 0,"
            f" whose sum is the image's {height * width} pixels"
        )


def _is_outside(
    left: float, top: float, right: float, bottom: float, height: int, width: int
) -> bool:
    return min(left, top) < -_ROUNDED or right > width + _ROUNDED or bottom > height + _ROUNDED


def _are_finite(values: Sequence[Any]) -> bool:
    try:
        return math.isfinite(sum(values)) and bool not in map(type, values)
    except (TypeError, OverflowError):  # of words, lists, or integers beyond floats
        return False


def shown(value: Any) -> str:
    """Return a value for a message, shortened where it is long."""
    return shortened(repr(value))
