"""The outlines of the scenes' objects: shapes and digits as coverage maps, with smooth edges."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

_FINER = 4
"""Shapes are drawn this many times larger and averaged, which makes their edges smooth."""
_INK = 110
"""Grey level of a digit's scan, of 255, from which a pixel belongs to the stroke."""
_SCAN_SIDE = 8
"""Pixels along a side of a scan, as it was taken."""


class SceneClass(NamedTuple):
    """A class of objects."""

    name: str
    category: int
    """Its id in the COCO files: with gaps, as COCO's own."""
    supercategory: str
    digit: int | None
    """Which of the digits' scans show it; None for a shape."""


CLASSES = (
    SceneClass("disc", 1, "shape", None),
    SceneClass("ring", 2, "shape", None),
    SceneClass("square", 3, "shape", None),
    SceneClass("triangle", 4, "shape", None),
    SceneClass("star", 5, "shape", None),
    SceneClass("cross", 6, "shape", None),
    SceneClass("two", 12, "digit", 2),
    SceneClass("four", 14, "digit", 4),
)
"""The classes by index."""

_HIGHEST_TURN = 0.35  # radians; more would make other signs of digits
_UPRIGHT = {
    "disc": 0.0,
    "ring": 0.0,
    "square": np.pi / 4,
    "triangle": -np.pi / 2,
    "star": -np.pi / 2,
    "cross": 0.0,
}
"""Radians by which an outline, whose first corner is on the right, is turned to stand upright."""


def shape_coverage(name: str, size: float, generator: np.random.Generator) -> np.ndarray:
    """Return a shape's share of each pixel [h, w] from 0 to 1, turned and stretched at random.

    Args:
        name: a class of `CLASSES` without a digit.
        size: diameter of the circle around the shape, in pixels.
    """
    outlines = _outlines(name, generator)
    turn = _UPRIGHT[name] + generator.uniform(-_HIGHEST_TURN, _HIGHEST_TURN)
    stretch = np.exp(generator.uniform(-0.18, 0.18))
    radius = _FINER * size / 2
    middle = int(np.ceil(radius * max(stretch, 1 / stretch))) + _FINER
    middle += -middle % _FINER
    canvas = Image.new("L", (2 * middle, 2 * middle))
    draw = ImageDraw.Draw(canvas)
    for level, outline in zip((255, 0), outlines, strict=False):  # the second one is a hole
        stretched = outline * (stretch, 1 / stretch)
        corners = stretched @ _rotation(turn).T * radius + middle
        draw.polygon([tuple(corner) for corner in corners], fill=level)
    return np.asarray(canvas.reduce(_FINER), dtype=np.float32) / 255


def digit_coverage(scan: Image.Image, size: float, generator: np.random.Generator) -> np.ndarray:
    """Return a scanned digit's share of each pixel [h, w] from 0 to 1, slightly turned.

    Args:
        scan: grey levels, white on black.
        size: side of the scan in the scene, in pixels.
    """
    turn = generator.uniform(-_HIGHEST_TURN, _HIGHEST_TURN)
    side = int(np.ceil(size * (abs(np.cos(turn)) + abs(np.sin(turn))))) + 2
    # Pillow maps a place in the result to one in the scan.
    matrix = _rotation(-turn) * scan.width / size
    offset = scan.width / 2 - matrix @ (side / 2, side / 2)
    levels = scan.transform(
        (side, side),
        Image.Transform.AFFINE,
        (*matrix[0], offset[0], *matrix[1], offset[1]),
        resample=Image.Resampling.BICUBIC,
    )
    # Levels rise from 0 to 255 over a pixel of the scan; the edge shall be one pixel wide.
    slope = size / _SCAN_SIDE / 255
    return np.clip((np.asarray(levels, dtype=np.float32) - _INK) * slope + 0.5, 0, 1)


def _outlines(name: str, generator: np.random.Generator) -> list[np.ndarray]:
    """Polygons [n, 2] in the unit circle: the shape's, and its hole's where it has one."""
    if name == "disc":
        return [_regular(72)]
    if name == "ring":
        return [_regular(72), _regular(72) * generator.uniform(0.45, 0.68)]
    if name == "square":
        return [_regular(4)]
    if name == "triangle":
        return [_regular(3)]
    if name == "star":
        inner = generator.uniform(0.38, 0.5)
        return [_regular(10) * np.tile([1, inner], 5)[:, None]]
    if name == "cross":
        arm = generator.uniform(0.22, 0.34)
        far = np.sqrt(1 - arm**2)
        quarter = np.array([(far, -arm), (far, arm), (arm, arm)])
        turns = [_rotation(quarters * np.pi / 2) for quarters in range(4)]
        return [np.concatenate([quarter @ turn.T for turn in turns])]
    raise ValueError(f"no shape is called {name!r}")


def _regular(corners: int) -> np.ndarray:
    angles = np.arange(corners) * (2 * np.pi / corners)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def _rotation(angle: float) -> np.ndarray:
    cosine, sine = np.cos(angle), np.sin(angle)
    return np.array([(cosine, -sine), (sine, cosine)])
