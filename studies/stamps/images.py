"""One picture of cut-outs pasted on a photograph, with the class of every pixel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from studies.stamps.cutouts import (
    CLASSES,
    PHOTOGRAPHS,
    SPLITS,
    STAMPS,
    Split,
    list_cutouts,
    list_photographs,
    load_cutout,
    load_photograph,
)
from vision_ttt.data.mask_folders import LabelledImage

BACKGROUND = 0
"""The label of the photograph behind; pixels of class k have label k + 1."""

_CELL = 96  # pixels along the side of a cell, in which one cut-out has its middle
_SIZES = (48, 128)  # pixels of a cut-out's longer side
_TURN = 20.0  # degrees, to either side
_JITTER = 0.25  # of a cell, to either side
_OPAQUE = 128  # least alpha, of 255, of pixels that are the cut-out's
_SIDES = (2 * _CELL, 1024)


@dataclass(frozen=True)
class StampSettings:
    """What pictures of cut-outs are made from.

    Args:
        side: of the pictures in pixels, 192 to 1,024. Cut-outs keep their sizes in pixels.
        density: share of the cells of 96 × 96 pixels that have a cut-out, from above 0 to 1.
        seed: of everything random.
        stamps: folder of the cut-outs: PNG files with alpha, in the folders of
            `studies.stamps.cutouts.CLASSES`.
        photographs: folder of the JPEG files behind them.

    Raises:
        ValueError: a value is out of its range.
    """

    side: int = 512
    density: float = 0.7
    seed: int = 0
    stamps: str = str(STAMPS)
    photographs: str = str(PHOTOGRAPHS)

    def __post_init__(self) -> None:
        for name, (least, most) in {"side": _SIDES, "seed": (0, 2**63 - 1)}.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise ValueError(
                    f"{name} is {value!r}; it must be a whole number from {least} to {most}"
                )
        density = self.density
        is_number = isinstance(density, (int, float)) and not isinstance(density, bool)
        if not is_number or not 0.01 <= density <= 1:
            raise ValueError(f"density is {density!r}; it must be a number from 0.01 to 1")
        for name in ("stamps", "photographs"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must name a folder")


class StampPictures:
    """Makes the pictures of a split; its cut-outs and photographs are in no other split.

    Raises:
        FileNotFoundError: there are too few cut-outs or photographs.
    """

    def __init__(self, settings: StampSettings, split: Split) -> None:
        self.settings = settings
        self.split = split
        self.cutouts = list_cutouts(Path(settings.stamps).expanduser(), split)
        self.photographs = list_photographs(Path(settings.photographs).expanduser(), split)

    def render(self, index: int) -> LabelledImage:
        """Make picture `index`; it depends on settings, split, index and the files alone.

        Raises:
            ImageError: a file does not decode.
        """
        settings = self.settings
        generator = np.random.default_rng([settings.seed, SPLITS.index(self.split), index])
        canvas = _crop(load_photograph(_any(self.photographs, generator)), settings.side, generator)
        labels = Image.new("L", canvas.size, BACKGROUND)
        count = settings.side // _CELL
        places = (np.mgrid[:count, :count].reshape(2, -1).T + 0.5) * (settings.side / count)
        for place in generator.permutation(places):
            if generator.random() >= settings.density:
                continue
            label = int(generator.integers(len(CLASSES)))
            cutout = _turned(load_cutout(_any(self.cutouts[label], generator)), generator)
            middle = place + generator.uniform(-_JITTER, _JITTER, 2) * _CELL
            left, top = (round(float(each)) for each in middle - np.array(cutout.size) / 2)
            canvas.paste(cutout, (left, top), cutout)
            opaque = cutout.getchannel("A").point(lambda alpha: 255 * (alpha >= _OPAQUE))
            labels.paste(label + 1, (left, top, left + cutout.width, top + cutout.height), opaque)
        return LabelledImage(canvas, np.array(labels))


def _any(paths: Sequence[Path], generator: np.random.Generator) -> Path:
    return paths[generator.integers(len(paths))]


def _crop(photograph: Image.Image, side: int, generator: np.random.Generator) -> Image.Image:
    """A random square of a photograph, mirrored half of the time, enlarged where it is smaller."""
    most = min(photograph.size)
    extent = int(generator.integers(min(side, most), most + 1))
    left, top = (int(generator.integers(length - extent + 1)) for length in photograph.size)
    box = (left, top, left + extent, top + extent)
    crop = photograph.resize((side, side), Image.Resampling.BILINEAR, box, reducing_gap=2.0)
    return _mirrored(crop, generator)


def _turned(cutout: Image.Image, generator: np.random.Generator) -> Image.Image:
    """A cut-out of a random size, mirrored half of the time, turned a little."""
    factor = generator.uniform(*_SIZES) / max(cutout.size)
    size = tuple(max(round(factor * length), 1) for length in cutout.size)
    turned = cutout.resize(size, Image.Resampling.BILINEAR).rotate(
        generator.uniform(-_TURN, _TURN), Image.Resampling.BILINEAR, expand=True
    )
    return _mirrored(turned, generator)


def _mirrored(image: Image.Image, generator: np.random.Generator) -> Image.Image:
    """The image or, half of the time, its mirror image."""
    mirror = Image.Transpose.FLIP_LEFT_RIGHT
    return image.transpose(mirror) if generator.random() < 0.5 else image
