"""Colours of classes, legends that name them beside a picture, and sheets of pictures."""

from __future__ import annotations

import colorsys
import io
from collections.abc import Sequence

from matplotlib.font_manager import findfont
from PIL import Image, ImageDraw, ImageFont

Colour = tuple[int, int, int]
"""Red, green and blue, from 0 to 255."""

# Turning by the golden ratio keeps any number of hues apart without knowing how many will follow.
_TURN = (5**0.5 - 1) / 2
# Saturation and value in turn. Of many tuples tried, the nearest two of the first 8, 20, 60 and
# 150 colours are far apart in CIELAB with these (42, 19, 6.6 and 1.4).
_TIERS = ((0.65, 1.0), (0.65, 0.7), (0.8, 1.0), (0.95, 0.85), (0.5, 1.0), (0.65, 0.4))
_SMALLEST, _LARGEST = 12, 28  # pixels of a legend's letters
_LONGEST = 12  # times its letters' height, is how wide a name may be
_FEWEST_ROWS = 8  # of a legend, however low the picture is
_GAP = 6  # pixels between the pictures of a sheet
_HEADING = 24  # pixels of height


def palette(count: int) -> list[Colour]:
    """Return a colour for each of `count` classes: all different, none black, white or grey.

    A class has the same colour whatever the number of classes behind it.

    Raises:
        ValueError: `count` is negative.
    """
    if count < 0:
        raise ValueError(f"count is {count}; it must be at least 0")
    colours: dict[Colour, None] = {}
    turn = 0
    while len(colours) < count:
        saturation, value = _TIERS[turn % len(_TIERS)]
        levels = colorsys.hsv_to_rgb(turn * _TURN % 1.0, saturation, value)
        red, green, blue = (round(255 * level) for level in levels)
        colours.setdefault((red, green, blue))  # rounding may have made it before
        turn += 1
    return list(colours)


def with_legend(picture: Image.Image, entries: Sequence[tuple[str, Colour]]) -> Image.Image:
    """Return an RGB copy of a picture with names and their colours at its right, top to bottom.

    Args:
        picture: stays at the top left, a pixel for a pixel.
        entries: names with their colours, in this order; long names are cut off. Without any, the
            picture is not extended.
    """
    picture = picture.convert("RGB")
    if not entries:
        return picture
    size = min(max(picture.height // 32, _SMALLEST), _LARGEST)
    font = ImageFont.truetype(findfont("DejaVu Sans"), size)  # matplotlib brings it along
    shown = [(shortened(name, font, _LONGEST * size), colour) for name, colour in entries]
    line = round(1.5 * size)
    rows = min(max(picture.height // line, _FEWEST_ROWS), len(shown))
    columns = [shown[start : start + rows] for start in range(0, len(shown), rows)]
    widths = [
        3 * size + round(max(font.getlength(name) for name, _ in column)) for column in columns
    ]
    canvas = Image.new(
        "RGB", (picture.width + sum(widths), max(picture.height, rows * line)), "white"
    )
    canvas.paste(picture, (0, 0))
    draw = ImageDraw.Draw(canvas)
    left = picture.width
    for column, width in zip(columns, widths, strict=True):
        for row, (name, colour) in enumerate(column):
            middle = row * line + line // 2
            top = middle - size // 2
            swatch = (left + size // 2, top, left + size // 2 + size, top + size)
            draw.rectangle(swatch, fill=colour, outline="black")
            draw.text((left + 2 * size, middle), name, fill="black", font=font, anchor="lm")
        left += width
    return canvas


def shortened(name: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    """Return a name on one line, its end cut off where it is longer than `width` pixels."""
    name = " ".join(name.split())
    if font.getlength(name) <= width:
        return name
    while name and font.getlength(name + "…") > width:
        name = name[:-1]
    return name + "…"


def picture_rows(rows: Sequence[Sequence[Image.Image]], headings: Sequence[str]) -> Image.Image:
    """Return rows of pictures in columns under their headings; those of a row have one size."""
    column = max(row[0].width for row in rows) + _GAP
    height = _HEADING + sum(row[0].height + _GAP for row in rows) - _GAP
    sheet = Image.new("RGB", (len(headings) * column - _GAP, height), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.truetype(findfont("DejaVu Sans"), _HEADING * 2 // 3)
    for place, heading in enumerate(headings):
        draw.text((place * column, _HEADING // 2), heading, fill="black", font=font, anchor="lm")
    top = _HEADING
    for row in rows:
        for place, picture in enumerate(row):
            sheet.paste(picture, (place * column, top))
        top += row[0].height + _GAP
    return sheet


def as_png(picture: Image.Image) -> bytes:
    """Return the content of a .png file of a picture."""
    content = io.BytesIO()
    picture.save(content, format="PNG")
    return content.getvalue()
