"""Slides of microscopes (SVS, NDPI, MRXS and others that OpenSlide opens) in bands of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openslide
from PIL import Image
from torch import Tensor

from vision_ttt.file_kinds import check_regular
from vision_ttt.whole.errors import naming
from vision_ttt.whole.pictures import Normalisation, check_channels, file_identity, level_of

_ROWS = 64
"""Rows that are read at once, from a multiple of it on, so that pixels do not depend on bands."""


class SlidePicture:
    """One level of a slide, RGB, whose rows are decoded when they are read.

    Where the slide was not scanned, pixels have its background colour, or white.

    Args:
        path: of the file.
        normalisation: of red, green and blue.
        level: of the slide's pyramid; 0 is the full resolution, and the default.
        mpp: microns per pixel, instead of ``level``. The coarsest level whose pixels are at most
            5 % wider is read.

    Attributes:
        mpp: microns per pixel of the level; None where the slide does not say it.

    Raises:
        WholePictureError: it is no such file, or has no such level.
        FileNotFoundError: there is no file.
    """

    channels = 3

    def __init__(
        self,
        path: str | Path,
        normalisation: Normalisation,
        *,
        level: int | None = None,
        mpp: float | None = None,
    ) -> None:
        self.path, self.normalisation = Path(path), normalisation
        check_regular(self.path)
        check_channels(3, normalisation)
        with naming(self.path, "a slide"):
            # It stays open as long as the picture: regions are read from it.
            self._slide = openslide.OpenSlide(self.path)
            said: Any = self._slide.properties
            finest = said.get(openslide.PROPERTY_NAME_MPP_X)
            factors = self._slide.level_downsamples
            spacings = [None if finest is None else float(finest) * each for each in factors]
            self.level = level_of(self.path, spacings, level, mpp)
            self.mpp, self._factor = spacings[self.level], factors[self.level]
            self.width, self.height = self._slide.level_dimensions[self.level]
            self._background = f"#{said.get(openslide.PROPERTY_NAME_BACKGROUND_COLOR, 'ffffff')}"
            # OpenSlide's cache, and what a region is converted to.
            self.memory = 2**25 + 16 * _ROWS * self.width
            self._region(self.height - 1, 1, width=1)

    @property
    def identity(self) -> str:
        """See :func:`vision_ttt.whole.pictures.file_identity`."""
        return f"{file_identity(self.path)} {self.level}"

    def read(self, first: int, last: int) -> Tensor:
        """Rows [3, n, W] float32, normalised."""
        parts = []
        with naming(self.path, "a slide"):
            for top in range(first - first % _ROWS, last, _ROWS):
                region = self._region(top, min(_ROWS, self.height - top), self.width)
                parts.append(region[max(first - top, 0) : last - top])
        return self.normalisation(np.concatenate(parts))

    def _region(self, top: int, rows: int, width: int) -> np.ndarray:
        """Pixels [n, width, 3]."""
        corner, size = (0, round(top * self._factor)), (width, rows)
        region = self._slide.read_region(corner, self.level, size)
        opaque = Image.new("RGB", size, self._background)
        opaque.paste(region, mask=region.getchannel("A"))
        return np.asarray(opaque)
