"""One picture of letters strewn over clutter; a mark in a corner says which ones count."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw
from scipy.spatial import ConvexHull

from studies.letters.fonts import FONTS, SPLITS, Split, load_font
from vision_ttt.data.scene_textures import dull_colours, smooth_noise

ALPHABET = "AEHKLMRSTXBCDFGJNOPQUVWYZ"
"""The letters by class, from which the first ones are taken: of no two is one a part or a mirror
image of the other, as far as that goes; I is a stroke of clutter and left out."""
INKS = {"warm": (0.0, 60.0), "cool": (170.0, 230.0)}
"""Kind of ink → its hues, in degrees."""
BACKGROUND = 0
"""The label of pixels of no letter that counts; those of class k have label k + 1."""

_CELL = 1.5  # sides of a letter's cell, in heights of letters
_TURN = 12.0  # degrees, to either side
_STRETCH = 0.15  # of a letter's height, to either side
_NOISE = 0.03  # deviation, of 1
_INSET = 2  # pixels from the mark to the border
_MARK = 8  # sides of the mark along the picture's
_LEAST_MARK = 8  # pixels


@dataclass(frozen=True)
class LetterSettings:
    """What pictures of letters are rendered from.

    Args:
        side: of the pictures in pixels. Letters, clutter and textures keep their sizes in pixels.
        classes: how many letters of `ALPHABET` there are.
        glyph: height of the letters in pixels.
        density: share of the cells that have a letter, from above 0 to 1; a cell is 1.5 glyphs
            wide.
        clutter: share of the other cells that have strokes of the letters' colours, 0 to 1.
        seed: of everything random.
        mark: pixels along the side of the mark; None for an eighth of the picture's, so that its
            share of the picture is the same at any size.
        by_mark: whether only letters of the mark's kind of ink count; otherwise all do.

    Raises:
        ValueError: a value is out of its range.
    """

    side: int = 256
    classes: int = 10
    glyph: int = 28
    density: float = 0.7
    clutter: float = 0.5
    seed: int = 0
    mark: int | None = None
    by_mark: bool = True

    def __post_init__(self) -> None:
        whole = {"side": (64, 8192), "classes": (2, len(ALPHABET)), "glyph": (12, 128)}
        whole["seed"] = (0, 2**63 - 1)
        for name, (least, most) in whole.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise ValueError(
                    f"{name} is {value!r}; it must be a whole number from {least} to {most}"
                )
        for name, least in {"density": 0.01, "clutter": 0.0}.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ValueError(f"{name} is {value!r}; it must be a number")
            if not least <= value <= 1:
                raise ValueError(f"{name} is {value!r}; it must be from {least} to 1")
        if self.side < 2 * self.cell:
            raise ValueError(
                f"side is {self.side}; letters of glyph {self.glyph} need at least {2 * self.cell}"
            )
        if not isinstance(self.by_mark, bool):
            raise ValueError(f"by_mark is {self.by_mark!r}; it must be true or false")
        if self.mark is None:
            return
        # So wide that one cell at least, in the opposite corner, is left for a letter.
        count = self.side // self.cell
        farthest = (count - 0.5) * self.side / count
        most = min(self.side // 2, math.ceil(farthest - _INSET - self.cell / 2) - 1)
        is_whole = isinstance(self.mark, int) and not isinstance(self.mark, bool)
        if not is_whole or not _LEAST_MARK <= self.mark <= most:
            raise ValueError(
                f"mark is {self.mark!r}; it must be a whole number from {_LEAST_MARK} to {most} on"
                f" pictures of {self.side} with letters of glyph {self.glyph}"
            )

    @property
    def cell(self) -> int:
        """Pixels along the side of a cell."""
        return round(_CELL * self.glyph)

    @property
    def mark_side(self) -> int:
        """Pixels along the side of the mark."""
        return self.side // _MARK if self.mark is None else self.mark

    @property
    def names(self) -> tuple[str, ...]:
        """The classes by index."""
        return tuple(ALPHABET[: self.classes])


class Letter(NamedTuple):
    """A letter on a picture."""

    label: int
    """Index of its class."""
    outline: np.ndarray
    """Corners [n, 2] of its convex hull: x and y in pixels."""
    counts: bool
    """Whether its ink is of the mark's kind, or all letters count."""
    is_ringed: bool
    """Whether it is the one with a ring around it."""
    distance: float
    """Pixels from its middle to the mark's."""


@dataclass(frozen=True)
class LetterPicture:
    """A picture and what is on it."""

    image: Image.Image
    letters: tuple[Letter, ...]
    ink: int
    """Index in `INKS` of the mark's kind."""
    mark: tuple[float, float]
    """The middle of the mark: x and y in pixels."""

    @property
    def ringed(self) -> int:
        """The class of the letter with a ring."""
        return next(letter.label for letter in self.letters if letter.is_ringed)

    def labels(self) -> np.ndarray:
        """The pixels' labels [H, W] uint8: letters that count by their hulls, else `BACKGROUND`."""
        canvas = Image.new("L", self.image.size, BACKGROUND)
        for letter in self.letters:
            if letter.counts:
                fill_outline(canvas, letter, letter.label + 1)
        return np.array(canvas)


def fill_outline(canvas: Image.Image, letter: Letter, value: int) -> None:
    """Fill the hull of a letter on a canvas of mode L."""
    ImageDraw.Draw(canvas).polygon([tuple(corner) for corner in letter.outline], fill=value)


def render_letters(settings: LetterSettings, split: Split, index: int) -> LetterPicture:
    """Render picture `index` of a split; it depends on the arguments alone.

    The splits' letters are of different families of fonts.
    """
    generator = np.random.default_rng([settings.seed, SPLITS.index(split), index])
    side, cell = settings.side, settings.cell
    canvas = _background(side, generator)
    ink = int(generator.integers(len(INKS)))
    corner = generator.integers(2, size=2)  # left or right, top or bottom
    extent = settings.mark_side
    mark = _INSET + extent / 2 + corner * (side - 2 * _INSET - extent)
    count = side // cell
    places = (np.mgrid[:count, :count].reshape(2, -1).T[:, ::-1] + 0.5) * (side / count)
    # The mark has its corner to itself.
    free = places[np.abs(places - mark).max(axis=1) > (extent + cell) / 2]
    has_letter = generator.random(len(free)) < settings.density
    has_letter[generator.integers(len(free))] = True
    letters = []
    for place, is_letter in zip(free, has_letter, strict=True):
        if not is_letter:
            if generator.random() < settings.clutter:
                _draw_strokes(canvas, place, settings.glyph, generator)
            continue
        kind = int(generator.integers(len(INKS)))
        label = int(generator.integers(settings.classes))
        outline = _draw_letter(canvas, label, place, kind, settings, split, generator)
        distance = float(np.linalg.norm(outline.mean(axis=0) - mark))
        counts = kind == ink or not settings.by_mark
        letters.append(Letter(label, outline, counts, False, distance))
    chosen = int(generator.integers(len(letters)))
    letters[chosen] = letters[chosen]._replace(is_ringed=True)
    _draw_ring(canvas, letters[chosen].outline)
    _draw_mark(canvas, mark, extent, ink, generator)
    middle = (float(mark[0]), float(mark[1]))
    return LetterPicture(_with_noise(canvas, generator), tuple(letters), ink, middle)


def _background(side: int, generator: np.random.Generator) -> Image.Image:
    """A dark surface of smooth noise; its grains have the same sizes on any canvas."""
    first, second = dull_colours(0.25, generator)
    pattern = np.zeros((side, side), dtype=np.float32)
    for pixels, share in ((64, 0.5), (24, 0.3), (8, 0.2)):
        pattern += share * smooth_noise(side, side, max(round(side / pixels), 1), generator)
    surface = first + pattern[..., None] * (second - first)
    return Image.fromarray(np.rint(np.clip(surface, 0, 1) * 255).astype(np.uint8))


def _ink(kind: int, generator: np.random.Generator) -> tuple[int, int, int]:
    """A bright colour of a kind of ink."""
    least, most = tuple(INKS.values())[kind]
    hue = generator.uniform(least, most) / 60
    saturation, value = generator.uniform(0.6, 0.95), generator.uniform(0.75, 1.0)
    # Of a hue in sixths of a circle each channel falls from 1 to 0 between its first and second.
    away = np.abs((hue - np.array((0, 2, 4)) + 3) % 6 - 3)
    levels = value * (1 - saturation * np.clip(away - 1, 0, 1))
    red, green, blue = (round(255 * level) for level in levels)
    return red, green, blue


def _draw_letter(
    canvas: Image.Image,
    label: int,
    place: np.ndarray,
    kind: int,
    settings: LetterSettings,
    split: Split,
    generator: np.random.Generator,
) -> np.ndarray:
    """Draw a letter near a place, and return the corners of its hull."""
    height = round(settings.glyph * generator.uniform(1 - _STRETCH, 1 + _STRETCH))
    fonts = FONTS[split]
    font = load_font(fonts[generator.integers(len(fonts))], height)
    left, top, right, bottom = font.getbbox(ALPHABET[label])
    side = int(np.ceil(np.hypot(right - left, bottom - top))) + 2
    stencil = Image.new("L", (side, side))
    start = ((side - right - left) / 2, (side - top - bottom) / 2)
    ImageDraw.Draw(stencil).text(start, ALPHABET[label], fill=255, font=font)
    stencil = stencil.rotate(generator.uniform(-_TURN, _TURN), Image.Resampling.BICUBIC)
    room = max((settings.cell - settings.glyph) / 2, 1)
    x, y = np.rint(place - side / 2 + generator.uniform(-room / 2, room / 2, 2)).astype(int)
    canvas.paste(_ink(kind, generator), (int(x), int(y)), stencil)
    rows, columns = np.nonzero(np.asarray(stencil) >= 128)
    points = np.stack((columns, rows), axis=1)
    corners = points[ConvexHull(points).vertices] + (x, y)
    return np.clip(corners, 0, settings.side - 1)


def _draw_strokes(
    canvas: Image.Image, place: np.ndarray, glyph: int, generator: np.random.Generator
) -> None:
    """Draw a few strokes of one ink about as large and thick as a letter, which is none."""
    draw = ImageDraw.Draw(canvas)
    colour = _ink(int(generator.integers(len(INKS))), generator)
    for _ in range(generator.integers(1, 4)):
        ends = place + generator.uniform(-0.5, 0.5, (2, 2)) * glyph
        thickness = max(round(glyph * generator.uniform(0.06, 0.2)), 1)
        if generator.random() < 0.5:
            draw.line([tuple(end) for end in ends], fill=colour, width=thickness)
        else:
            low, high = ends.min(axis=0), ends.max(axis=0) + 3
            begin = generator.uniform(0, 360)
            box = [tuple(low), tuple(high)]
            draw.arc(box, begin, begin + generator.uniform(60, 300), fill=colour, width=thickness)


def _draw_ring(canvas: Image.Image, outline: np.ndarray) -> None:
    """Draw a white ring around a hull."""
    middle = (outline.min(axis=0) + outline.max(axis=0)) / 2
    radius = np.linalg.norm(outline - middle, axis=1).max() + 2
    box = [tuple(middle - radius), tuple(middle + radius)]
    ImageDraw.Draw(canvas).ellipse(box, outline=(255, 255, 255), width=2)


def _draw_mark(
    canvas: Image.Image,
    middle: np.ndarray,
    extent: int,
    ink: int,
    generator: np.random.Generator,
) -> None:
    """Draw the mark: a plate of a kind of ink in a white frame."""
    box = [tuple(middle - extent / 2), tuple(middle + extent / 2 - 1)]
    draw = ImageDraw.Draw(canvas)
    draw.rectangle(box, fill=_ink(ink, generator), outline=(255, 255, 255), width=2)


def _with_noise(canvas: Image.Image, generator: np.random.Generator) -> Image.Image:
    levels = np.asarray(canvas, dtype=np.float32)
    levels = levels + 255 * _NOISE * generator.standard_normal(levels.shape, dtype=np.float32)
    return Image.fromarray(np.clip(np.rint(levels), 0, 255).astype(np.uint8))
