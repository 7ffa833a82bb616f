"""The fonts of the letters: those that come with matplotlib, each family in one split alone."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal

from PIL import ImageFont

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")

FONTS: dict[Split, tuple[str, ...]] = {
    "train": (
        "DejaVuSans",
        "DejaVuSans-Bold",
        "DejaVuSans-Oblique",
        "DejaVuSans-BoldOblique",
        "DejaVuSerif",
        "DejaVuSerif-Bold",
        "DejaVuSerif-Italic",
        "DejaVuSerif-BoldItalic",
        "STIXGeneral",
        "STIXGeneralBol",
        "STIXGeneralItalic",
        "STIXGeneralBolIta",
    ),
    "validation": ("DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique"),
    "test": ("cmr10", "cmb10", "cmss10", "cmtt10"),
}
"""Split → files without their suffix. Families: DejaVu Sans and Serif and STIX; DejaVu Sans Mono;
Computer Modern."""


@cache
def load_font(name: str, size: int) -> ImageFont.FreeTypeFont:
    """A font whose capitals are `size` pixels high, to about a pixel.

    Raises:
        FileNotFoundError: matplotlib comes without it.
    """
    file = _folder() / f"{name}.ttf"
    if not file.is_file():
        raise FileNotFoundError(2, "matplotlib comes without this font", str(file))
    # Raqm, which Pillow takes where it finds it, places some letters a pixel away.
    layout = ImageFont.Layout.BASIC
    trial = ImageFont.truetype(str(file), 100, layout_engine=layout)
    _left, top, _right, bottom = trial.getbbox("H")
    size = max(round(100 * size / (bottom - top)), 1)
    return ImageFont.truetype(str(file), size, layout_engine=layout)


@cache
def _folder() -> Path:
    import matplotlib  # a second to import, and only its files are needed

    return Path(matplotlib.get_data_path()) / "fonts" / "ttf"
