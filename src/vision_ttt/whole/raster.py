"""GeoTIFF, cloud-optimised GeoTIFF and whatever else GDAL opens, read in bands of rows."""

from __future__ import annotations

import hashlib
import io
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
import tifffile
import torch
from rasterio.enums import ColorInterp, MaskFlags
from rasterio.errors import NotGeoreferencedWarning, RasterioIOError
from rasterio.windows import Window
from torch import Tensor

from vision_ttt.file_kinds import check_regular
from vision_ttt.whole.errors import WholePictureError, naming
from vision_ttt.whole.pictures import (
    LARGEST_SEGMENT,
    Normalisation,
    check_channels,
    file_identity,
    largest_of,
)
from vision_ttt.whole.tiff import geographic_tags

_CACHE = 2**26
"""The size in bytes of GDAL's cache of decoded blocks. GDAL's default is a share of RAM."""
_OF_VIEWERS = (".aux.xml", ".ovr")
"""Suffixes of files that viewers write beside a raster: statistics and overviews."""
# VRT files may name Python functions.
_OPTIONS = {"GDAL_CACHEMAX": _CACHE, "GDAL_VRT_ENABLE_PYTHON": "NO"}


class RasterPicture:
    """A picture of a file that GDAL opens, whose rows are decoded when they are read.

    Pixels that the file declares as no data, by a value, a mask or an alpha band, are replaced by
    the mean, and so is NaN. An alpha band is not a channel.

    Args:
        path: of the file.
        normalisation: of its channels.
        bands: numbers of the bands that are the channels, from 1; None for all.

    Attributes:
        memory: bytes of GDAL with its cache, and of the block that is being decoded.
        geographic: coordinate system and transform as GeoTIFF tags, for
            :func:`vision_ttt.whole.tiff.write_mask`.
        has_gaps: whether pixels may be without data.

    Raises:
        WholePictureError: it is no such file, is truncated, or has other bands or pixels.
        FileNotFoundError: there is no file.
    """

    def __init__(
        self, path: str | Path, normalisation: Normalisation, bands: Sequence[int] | None = None
    ) -> None:
        self.path, self.normalisation = Path(path), normalisation
        check_regular(self.path)
        with self._gdal():
            # It stays open as long as the picture: windows are read from it.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NotGeoreferencedWarning)
                self._file = rasterio.open(self.path)
            file = self._file
            self.height, self.width = file.height, file.width
            self.bands = self._checked(bands)
            self.channels = len(self.bands)
            self._check_colours()
            (dtype, *others) = {np.dtype(file.dtypes[band - 1]) for band in self.bands}
            if others:
                raise WholePictureError(f"{self.path} has bands of {dtype} and {others[0]}")
            self.dtype = dtype
            flags = {flag for band in self.bands for flag in file.mask_flag_enums[band - 1]}
            self.has_gaps = bool(flags - {MaskFlags.all_valid}) or dtype.kind == "f"
            self._check_blocks()
            self.geographic = self._geographic()
        try:
            largest_of(dtype)
            check_channels(self.channels, normalisation)
        except (TypeError, ValueError) as error:
            raise WholePictureError(f"{self.path}: {error}") from error

    @property
    def identity(self) -> str:
        """The bands and a digest of all files that are read, including the sources of a VRT."""
        beside = {Path(each) for each in self._file.files if not each.endswith(_OF_VIEWERS)}
        # A file in an archive has no path of its own.
        lines = [
            file_identity(each) if each.exists() else str(each)
            for each in sorted({self.path, *beside})
        ]
        digest = hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()
        return f"{self.path.resolve()} {self.bands} {digest}"

    def read(self, first: int, last: int) -> Tensor:
        """Rows [C, n, W] float32, normalised."""
        with self._gdal():
            pixels = self._file.read(self.bands, window=self._window(first, last))
        present = self._present(first, last, pixels).transpose(1, 2, 0) if self.has_gaps else None
        return self.normalisation(pixels.transpose(1, 2, 0), present)

    def has_data(self, first: int, last: int) -> Tensor:
        """Whether pixels of rows have data in some channel [n, W]."""
        pixels = None
        if self.dtype.kind == "f":
            with self._gdal():
                pixels = self._file.read(self.bands, window=self._window(first, last))
        return torch.from_numpy(self._present(first, last, pixels).any(0))

    def _present(self, first: int, last: int, pixels: np.ndarray | None) -> np.ndarray:
        """Which values of rows are data [C, n, W]; pixels are needed where they are floating."""
        with self._gdal():
            masks = self._file.read_masks(self.bands, window=self._window(first, last)) > 0
        return masks & ~np.isnan(pixels) if self.dtype.kind == "f" else masks

    def _window(self, first: int, last: int) -> Window:
        return Window(0, first, self.width, last - first)

    def _checked(self, bands: Sequence[int] | None) -> list[int]:
        """The requested bands; by default all bands that are not alpha bands."""
        count, kinds = self._file.count, self._file.colorinterp
        if bands is None:
            bands = [each + 1 for each in range(count) if kinds[each] != ColorInterp.alpha]
        if not bands or not {*bands} <= {*self._file.indexes}:
            raise WholePictureError(f"bands are {list(bands)}; {self.path} has 1 to {count}")
        return list(bands)

    def _check_colours(self) -> None:
        """Raise an error unless 0 is black: GDAL returns other pixel values unchanged."""
        kind = None
        if any(self._file.colorinterp[band - 1] == ColorInterp.palette for band in self.bands):
            kind = "palette"
        elif self._file.tags(ns="IMAGE_STRUCTURE").get("MINISWHITE") == "YES":
            kind = "miniswhite"
        if kind is not None:
            raise WholePictureError(
                f"{self.path} has pixels of the kind {kind}; accepted: levels of which 0 is black"
            )

    def _check_blocks(self) -> None:
        """Raise an error if blocks are too large for bands, or if the last block is missing."""
        rows, columns = max(self._file.block_shapes, key=math.prod)
        block = rows * columns * self.channels * self.dtype.itemsize
        if block > LARGEST_SEGMENT:
            raise WholePictureError(
                f"{self.path} has blocks of {rows} × {columns} pixels, each of which is "
                "decoded as a whole: write it again in tiles of 256 × 256"
            )
        # Memory holds a block twice: decoded, and in the cache by bands.
        self.memory = _CACHE + 40 * 2**20 + 2 * block
        self._file.read(self.bands, window=Window(self.width - 1, self.height - 1, 1, 1))

    def _geographic(self) -> list[tuple[Any, ...]]:
        """The tags that GDAL gives a GeoTIFF at the same place."""
        file = self._file
        points, system = file.gcps
        if file.crs is None and file.transform.is_identity and not points:
            return []
        place = {"gcps": points, "crs": system} if points else {"transform": file.transform}
        one = {"driver": "GTiff", "width": 1, "height": 1, "count": 1, "dtype": "uint8"}
        with rasterio.MemoryFile() as memory:
            with memory.open(**{**one, "crs": file.crs, **place}):
                pass
            with tifffile.TiffFile(io.BytesIO(memory.read())) as written:
                return geographic_tags(written.pages.first)

    @contextmanager
    def _gdal(self) -> Iterator[None]:
        """Run GDAL with this module's options, and name the file in its errors."""
        with naming(self.path, "a raster"), rasterio.Env(**_OPTIONS):
            try:
                yield
            except RasterioIOError as error:  # whose cause says more
                raise error.__cause__ or error from None
