"""The photographs that are cut out, by class, and those behind them; splits share none."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal

from PIL import Image

from vision_ttt.data.images import decoded, open_image

Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = ("train", "test")

STAMPS = Path("/usr/share/tuxpaint/stamps")
"""Where Debian's package tuxpaint-stamps-default puts them."""
PHOTOGRAPHS = Path("/usr/share/backgrounds/mate/nature")
"""Where Debian's package mate-backgrounds puts its photographs."""
CLASSES: Mapping[str, tuple[str, ...]] = {
    "bird": ("animals/birds",),
    "mammal": ("animals/mammals", "animals/marsupials"),
    "fish": ("animals/fish",),
    "insect": ("animals/insects",),
    "fruit": ("food/fruit",),
    "vegetable": ("food/vegetables",),
    "flower": ("plants/flowers",),
    "tool": ("household/tools", "household/arttools"),
}
"""Class → its folders among the stamps, in which almost all are photographs."""

_TESTED = 4  # every fourth file is for test
_FIRST_TESTED = 2
_LARGEST_CUTOUT = 256  # pixels of the longer side, kept in memory


def list_cutouts(folder: Path, split: Split) -> tuple[tuple[Path, ...], ...]:
    """Return the files of each class that belong to a split.

    Raises:
        FileNotFoundError: a class has too few; says how to get them.
    """
    return tuple(
        _of_split(
            [path for part in parts for path in sorted((folder / part).glob("*.png"))],
            split,
            f"cut-outs of class {name!r} are missing; install Debian's package"
            " tuxpaint-stamps-default, or give its folder of stamps as root_options.stamps",
            folder,
        )
        for name, parts in CLASSES.items()
    )


def list_photographs(folder: Path, split: Split) -> tuple[Path, ...]:
    """Return the photographs that belong to a split.

    Raises:
        FileNotFoundError: there are too few; says how to get them.
    """
    return _of_split(
        sorted(folder.glob("*.jpg")),
        split,
        "photographs are missing; install Debian's package mate-backgrounds, or give a folder of"
        f" {_FIRST_TESTED + 1} or more .jpg files as root_options.photographs",
        folder,
    )


def _of_split(paths: list[Path], split: Split, told: str, folder: Path) -> tuple[Path, ...]:
    if len(paths) <= _FIRST_TESTED:
        raise FileNotFoundError(2, told, str(folder))
    return tuple(
        path
        for index, path in enumerate(paths)
        if (index % _TESTED == _FIRST_TESTED) == (split == "test")
    )


@cache
def load_cutout(path: Path) -> Image.Image:
    """Read a photograph with alpha, without its transparent border; at most 256 pixels long.

    Raises:
        ImageError: it does not decode.
    """
    with decoded(path, str(path)) as opened:
        image = opened.convert("RGBA")
    image = image.crop(image.getchannel("A").getbbox())
    image.thumbnail((_LARGEST_CUTOUT, _LARGEST_CUTOUT), Image.Resampling.LANCZOS)
    return image


@cache
def load_photograph(path: Path) -> Image.Image:
    """Read a photograph as RGB.

    Raises:
        ImageError: it does not decode.
    """
    return open_image(path)
