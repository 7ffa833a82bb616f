"""One scene: objects before a textured background, with the visible part of each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
from PIL import Image

from vision_ttt.data.digits import Digits
from vision_ttt.data.scene_shapes import CLASSES, digit_coverage, shape_coverage
from vision_ttt.data.scene_textures import (
    darkened_around,
    draw_lines,
    dull_colours,
    photograph,
    texture,
    vivid_colours,
)

Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = ("train", "test")

SMALLEST, LARGEST = 0.08, 0.64
"""Diameters of objects, as fractions of the image's side. They differ by a factor of up to 8; most
are in between (their logarithm has a Beta(2, 2) distribution)."""
LEAST_VISIBLE = 1 / 3
"""Smallest visible fraction of an object's pixels. Objects with less are not annotated."""
LEAST_PIXELS = 24
"""Smallest number of visible pixels of an object. Objects with fewer are not annotated."""

_EMPTY = 0.06  # share of images without objects
_CROWDED = 0.06  # share of images with a crowd
_FEWEST_OBJECTS, _MOST_OBJECTS = 5, 12
_SINGLE = 1  # sets the generators of single objects apart from those of scenes
_SMALLEST_ALONE, _LARGEST_ALONE = 0.2, 0.95  # diameters of single objects, parts of the side
_TRIES = 8  # places tried for an object before it may hide another one


class Instance(NamedTuple):
    """What is seen of an object, or of a crowd of objects of one class."""

    label: int
    """Index of its class in `CLASSES`."""
    mask: np.ndarray
    """Its visible pixels, bool [H, W]."""
    is_crowd: bool


@dataclass(frozen=True)
class Scene:
    """A picture and what is on it."""

    image: Image.Image
    instances: list[Instance]
    """What is annotated, from back to front."""
    unlabelled: np.ndarray
    """Visible pixels of the objects that are not annotated, bool [H, W]."""


class _Placed(NamedTuple):
    """An object in its place, whatever is in front of it."""

    label: int
    coverage: np.ndarray
    """Its share of each pixel of the image [H, W]."""
    window: tuple[slice, slice]
    """Rows and columns outside which it has no pixel."""
    pixels: int
    """How many it has, with those outside the image."""
    member: bool
    """Whether it is one of a crowd."""


def render_scene(seed: int, split: Split, index: int, side: int) -> Scene:
    """Render scene `index` of a split, side × side pixels; it depends on the arguments alone.

    Digits of the two splits are of different scans.
    """
    generator = np.random.default_rng([seed, SPLITS.index(split), index])
    placed = _objects(split, side, generator)
    instances, unlabelled = _visible(placed, side)
    return Scene(_painted(placed, side, generator), instances, unlabelled)


def render_object(seed: int, split: Split, index: int, side: int) -> tuple[Image.Image, int]:
    """Render picture `index` of a single object, side × side pixels, and its class's index.

    It is painted as in scenes, nearly whole, of up to the picture's size.
    """
    generator = np.random.default_rng([seed, SPLITS.index(split), index, _SINGLE])
    label = int(generator.integers(len(CLASSES)))
    size = np.exp(generator.uniform(np.log(_SMALLEST_ALONE), np.log(_LARGEST_ALONE))) * side
    place = generator.uniform(0.45 * size, side - 0.45 * size, 2)
    placed = [_place(label, size, place, split, side, generator)]
    return _painted(placed, side, generator), label


def _painted(placed: list[_Placed], side: int, generator: np.random.Generator) -> Image.Image:
    """Objects before a background, from back to front, each of its own hue.

    All are brighter than what surrounds them, the background being dark and each in a shadow: a
    patch of bright and dark then looks alike whatever the colours, and shapes are learnt in
    hundreds of updates instead of thousands.
    """
    colours = dull_colours(generator.uniform(0.05, 0.25), generator)
    surface = draw_lines(texture(side, side, colours, generator), generator)
    for each in placed:
        fill = vivid_colours(colours, 0.4, generator.uniform(0.05, 0.2), generator)
        colours = np.concatenate([colours, fill])
        shares = each.coverage[each.window]
        own = texture(*shares.shape, fill, generator)
        surface = darkened_around(surface, each.coverage)
        surface[each.window] += shares[..., None] * (own - surface[each.window])
    return photograph(surface, generator)


def _objects(split: Split, side: int, generator: np.random.Generator) -> list[_Placed]:
    """The objects of a scene, from back to front."""
    placed: list[_Placed] = []
    if generator.random() < _EMPTY:
        return placed
    if generator.random() < _CROWDED:
        placed += _crowd(split, side, generator)
    for _ in range(generator.integers(_FEWEST_OBJECTS, _MOST_OBJECTS + 1)):
        label = int(generator.integers(len(CLASSES)))
        size = side * SMALLEST * (LARGEST / SMALLEST) ** generator.beta(2, 2)
        for _ in range(_TRIES):
            place = generator.uniform(0.35 * size, side - 0.35 * size, 2)
            candidate = _place(label, size, place, split, side, generator)
            if not _hides(candidate, placed):
                break
        placed.append(candidate)
    return placed


def _crowd(split: Split, side: int, generator: np.random.Generator) -> list[_Placed]:
    """Eight to fourteen small objects of one class, close together."""
    label = int(generator.integers(len(CLASSES)))
    middle = generator.uniform(0.25, 0.75, 2) * side
    size = side * generator.uniform(0.09, 0.13)
    return [
        _place(label, size, generator.normal(middle, 0.09 * side), split, side, generator)._replace(
            member=True
        )
        for _ in range(generator.integers(8, 15))
    ]


def _place(
    label: int,
    size: float,
    middle: np.ndarray,
    split: Split,
    side: int,
    generator: np.random.Generator,
) -> _Placed:
    """Put an object with its middle at (x, y) into an image."""
    digit = CLASSES[label].digit
    if digit is None:
        window = shape_coverage(CLASSES[label].name, size, generator)
    else:
        scans = _scans(split)[digit]
        # A scan's strokes fill less of its square than a shape of its circle.
        scan = scans[generator.integers(len(scans))]
        window = digit_coverage(scan, min(1.3 * size, LARGEST * side), generator)
    coverage = np.zeros((side, side), dtype=np.float32)
    left, top = (int(np.rint(each - window.shape[0] / 2)) for each in middle)
    rows, columns = _overlap(top, window.shape[0], side), _overlap(left, window.shape[1], side)
    coverage[rows[0], columns[0]] = window[rows[1], columns[1]]
    pixels = int((window >= 0.5).sum())
    return _Placed(label, coverage, (rows[0], columns[0]), pixels, member=False)


def _overlap(start: int, length: int, side: int) -> tuple[slice, slice]:
    """Where a window lies in the image, and which part of the window that is."""
    first, last = max(start, 0), max(min(start + length, side), max(start, 0))
    return slice(first, last), slice(first - start, last - start)


def _hides(candidate: _Placed, placed: list[_Placed]) -> bool:
    """Whether an object in front of others leaves less than 60 % of one of them to be seen."""
    others = candidate.coverage < 0.5
    return any(
        ((each.coverage >= 0.5) & others).sum() < 0.6 * each.pixels
        for each in placed
        if not each.member
    )


def _visible(placed: list[_Placed], side: int) -> tuple[list[Instance], np.ndarray]:
    """What is annotated, and the pixels of the objects that are not."""
    free = np.ones((side, side), dtype=bool)
    seen = []
    for each in reversed(placed):
        mask = (each.coverage >= 0.5) & free
        free &= ~mask
        seen.append((each, mask))
    instances, crowd, unlabelled = [], None, np.zeros_like(free)
    for each, mask in reversed(seen):
        if each.member:
            members = mask if crowd is None else crowd.mask | mask
            crowd = Instance(each.label, members, is_crowd=True)
        elif mask.sum() >= max(LEAST_PIXELS, LEAST_VISIBLE * each.pixels):
            instances.append(Instance(each.label, mask, is_crowd=False))
        else:
            unlabelled |= mask
    if crowd is not None and crowd.mask.sum() >= LEAST_PIXELS:
        instances.insert(0, crowd)
    elif crowd is not None:
        unlabelled |= crowd.mask
    return instances, unlabelled


@cache
def _scans(split: Split) -> dict[int, list[Image.Image]]:
    """The digits' scans of a split, by digit."""
    digits = Digits(split)
    wanted = {each.digit for each in CLASSES if each.digit is not None}
    scans: dict[int, list[Image.Image]] = {digit: [] for digit in sorted(wanted)}
    for image, digit in zip(digits.images, digits.targets, strict=True):
        if digit in wanted:
            scans[digit].append(image.convert("L"))
    return scans
