"""TIFF files that are read and written in bands of rows: tiled or in strips, BigTIFF, GeoTIFF."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
import torch
from torch import Tensor

from vision_ttt.file_kinds import check_regular
from vision_ttt.files import atomic_file
from vision_ttt.whole.errors import WholePictureError, naming
from vision_ttt.whole.pictures import (
    LARGEST_SEGMENT,
    NO_DATA,
    Normalisation,
    check_channels,
    file_identity,
    largest_of,
)

TILE = 256
"""Side of the tiles that are written."""
_GEOGRAPHIC = (33550, 33922, 34264, 34735, 34736, 34737)
"""Tags of GeoTIFF: where the pixels are on the earth."""
_COLOURS = (None, "MINISBLACK", "RGB")
"""Photometric interpretations whose pixels are grey levels from black, or RGB."""
_JPEG = (6, 7)
"""Compressions whose decoders turn YCbCr into RGB."""
_ORIENTATION = 274
"""The tag with the side of the picture that the first row is: 1 (the top) to 8."""
_NO_DATA = 42113
"""GDAL's tag with the value, as text, of pixels without data."""
_BIG = 2**31
LARGEST_ROW = 2**26
"""The largest decoded row of tiles in bytes that is kept. Larger ones are decoded per band."""


class TiffPicture:
    """A picture of a TIFF file, whose rows are decoded when they are read.

    The file may have tiles or strips, and may be a BigTIFF, an OME-TIFF or a pyramid. The first
    picture of a file is read, and the full resolution of a pyramid. Compressions other than deflate
    need the package imagecodecs. Values that the file declares as no data (GDAL's tag) are replaced
    by the mean.

    Args:
        path: of the file.
        normalisation: of its channels.

    Attributes:
        memory: bytes of a decoded row of tiles, which is kept for the next band if it is at most
            :data:`LARGEST_ROW`, and of the tile that is being decoded; 0 where nothing is decoded.
        geographic: the file's GeoTIFF tags, for :func:`write_mask`.
        has_gaps: whether pixels may be without data.

    Raises:
        WholePictureError: it is no such file, is truncated, not upright, or has other channels or
            pixels.
        FileNotFoundError: there is no file.
    """

    def __init__(self, path: str | Path, normalisation: Normalisation) -> None:
        self.path, self.normalisation = Path(path), normalisation
        check_regular(self.path)
        with naming(self.path, "TIFF"):
            # It stays open as long as the picture: pages are read from it.
            self._file = tifffile.TiffFile(self.path)
            self._page: Any = self._file.pages.first
            page = self._page
            if page.imagedepth != 1 or page.imagelength < 1 or page.imagewidth < 1:
                raise WholePictureError(
                    f"{self.path} is {page.imagewidth} × {page.imagelength} × {page.imagedepth}; "
                    "a picture of rows and columns is needed"
                )
            self.height, self.width = int(page.imagelength), int(page.imagewidth)
            self.channels = int(page.samplesperpixel)
            if page.dtype is None:
                raise WholePictureError(f"{self.path} has pixels of an unknown kind")
            self.dtype = np.dtype(page.dtype)
            kind = getattr(page.photometric, "name", None)
            if kind not in _COLOURS and not (kind == "YCBCR" and page.compression in _JPEG):
                raise WholePictureError(
                    f"{self.path} has pixels of the kind {kind}; accepted: grey (black is 0), RGB"
                )
            orientation = page.tags.valueof(_ORIENTATION)
            if orientation in range(2, 9):  # others than 1 to 8 mean nothing
                raise WholePictureError(
                    f"{self.path} is stored turned or mirrored (its orientation is {orientation}); "
                    "accepted: 1, upright. Save it upright first"
                )
            self._check_segments()
            rows, columns = self._segment
            line = rows * self.channels * self.dtype.itemsize
            self._keeps, self.memory = line * self.width <= LARGEST_ROW, 0
            if not self._is_stored:
                # While a tile is decoded, memory holds it encoded, decoded, and in a copy.
                self.memory = 3 * line * columns + self._keeps * line * self.width
            self._held: tuple[int, np.ndarray] | None = None
            self.geographic = geographic_tags(page)
            self._no_data = _no_data(page.tags.valueof(_NO_DATA), self.dtype)
            self.has_gaps = self._no_data is not None
        try:
            largest_of(self.dtype)
            check_channels(self.channels, normalisation)
        except (TypeError, ValueError) as error:
            raise WholePictureError(f"{self.path}: {error}") from error

    @property
    def identity(self) -> str:
        """See :func:`vision_ttt.whole.pictures.file_identity`."""
        return file_identity(self.path)

    def read(self, first: int, last: int) -> Tensor:
        """Rows [C, n, W] float32, normalised."""
        pixels = self._rows(first, last)
        return self.normalisation(pixels, self._present(pixels) if self.has_gaps else None)

    def has_data(self, first: int, last: int) -> Tensor:
        """Whether pixels of rows have data in some channel [n, W]."""
        return torch.from_numpy(self._present(self._rows(first, last)).any(-1))

    def _present(self, pixels: np.ndarray) -> np.ndarray:
        if np.isnan(self._no_data):
            return ~np.isnan(pixels)
        return pixels != self._no_data

    @property
    def _segment(self) -> tuple[int, int]:
        """Rows and columns of a tile or strip."""
        page = self._page
        if page.is_tiled:
            return int(page.tilelength), int(page.tilewidth)
        return min(int(page.rowsperstrip), self.height), self.width

    @property
    def _is_stored(self) -> bool:
        """Whether the pixels lie in the file row by row, as they are."""
        page = self._page
        plain = page.compression == page.planarconfig == page.predictor == page.fillorder == 1
        whole = page.is_contiguous and all(page.dataoffsets)  # 0: the writer left the strip out
        return bool(plain and not page.is_tiled and whole)

    def _check_segments(self) -> None:
        """Raise an error if the file lacks pixels, or has a tile or strip too large for bands."""
        page, (rows, columns) = self._page, self._segment
        down, across = -(-self.height // rows), -(-self.width // columns)
        planes = self.channels if page.planarconfig == 2 else 1
        size = self.path.stat().st_size
        ends = [sum(pair) for pair in zip(page.dataoffsets, page.databytecounts, strict=True)]
        if len(ends) < down * across * planes or max(ends) > size:
            raise WholePictureError(
                f"{self.path} is truncated: it says it has {self.width} × {self.height} pixels, "
                f"and {size} bytes do not hold them"
            )
        channels = 1 if planes > 1 else self.channels
        if self._is_stored:
            return
        decoded = rows * columns * channels * self.dtype.itemsize
        if decoded > LARGEST_SEGMENT:
            raise WholePictureError(
                f"{self.path} has a {'tile' if page.is_tiled else 'strip'} of {rows} × {columns} "
                "pixels, which is decoded as a whole: write it again in tiles of 256 × 256"
            )

    def _rows(self, first: int, last: int) -> np.ndarray:
        """Rows of pixels [n, W, C]."""
        with naming(self.path, "TIFF"):
            if self._is_stored:
                return self._stored_rows(first, last)
            if not self._keeps:
                return self._decoded_rows(first, last)
            rows, _ = self._segment
            out = np.empty((last - first, self.width, self.channels), self.dtype)
            for top in range(first // rows * rows, last, rows):
                if self._held is None or self._held[0] != top:
                    self._held = None  # its memory is for the next
                    self._held = top, self._decoded_rows(top, min(top + rows, self.height))
                begin, end = max(top, first), min(top + rows, last)
                out[begin - first : end - first] = self._held[1][begin - top : end - top]
            return out

    def _stored_rows(self, first: int, last: int) -> np.ndarray:
        page, row = self._page, self.width * self.channels
        dtype = self.dtype.newbyteorder(page.parent.byteorder)
        x = np.fromfile(
            self.path,
            dtype,
            (last - first) * row,
            offset=page.dataoffsets[0] + first * row * dtype.itemsize,
        )
        return x.astype(self.dtype, copy=False).reshape(last - first, self.width, self.channels)

    def _decoded_rows(self, first: int, last: int) -> np.ndarray:
        page, (rows, columns) = self._page, self._segment
        missing = 0 if self._no_data is None else self._no_data
        out = np.full((last - first, self.width, self.channels), missing, self.dtype)
        down, across = -(-self.height // rows), -(-self.width // columns)
        planes = range(self.channels if page.planarconfig == 2 else 1)
        tables = {"jpegtables": page.jpegtables, "jpegheader": page.jpegheader}
        for plane in planes:
            for place in range(first // rows * across, -(-last // rows) * across):
                index = plane * down * across + place
                count = page.databytecounts[index]
                if not count:  # an empty tile, which the writer left out
                    continue
                self._file.filehandle.seek(page.dataoffsets[index])
                data = self._file.filehandle.read(count)
                segment, (_, _, top, left, _), (_, high, wide, _) = page.decode(
                    data, index, **tables
                )
                if segment is None:
                    continue
                begin, end = max(top, first), min(top + high, last)
                wide = min(wide, self.width - left)
                channels = slice(None) if len(planes) == 1 else slice(plane, plane + 1)
                out[begin - first : end - first, left : left + wide, channels] = segment[
                    0, begin - top : end - top, :wide
                ]
        return out


def geographic_tags(page: Any) -> list[tuple[Any, ...]]:
    """The GeoTIFF tags of a page, as the writer is given them."""
    return [
        (tag.code, tag.dtype, tag.count, tag.value, True)
        for tag in page.tags
        if tag.code in _GEOGRAPHIC
    ]


def is_geographic(path: Path) -> bool:
    """Whether a TIFF file says where its pixels are on the earth.

    Raises:
        WholePictureError: it is no TIFF file.
    """
    check_regular(path)
    with naming(path, "TIFF"), tifffile.TiffFile(path) as file:
        return bool(geographic_tags(file.pages.first))


def _no_data(text: str | None, dtype: np.dtype) -> float | None:
    """The value of pixels without data; None where none can have it.

    Raises:
        ValueError: the text is no number.
    """
    value = float("nan" if text is None else text)
    if np.issubdtype(dtype, np.integer):
        limits = np.iinfo(dtype)
        return value if limits.min <= value <= limits.max and value.is_integer() else None
    return None if text is None else float(np.array(value).astype(dtype))


def write_mask(
    path: Path,
    bands: Iterable[Tensor],
    size: tuple[int, int],
    *,
    classes: Sequence[str],
    colours: Sequence[tuple[int, int, int]],
    geographic: Sequence[tuple[Any, ...]] = (),
    has_gaps: bool = False,
    mpp: float | None = None,
) -> None:
    """Write class indices as a TIFF of compressed tiles with a palette, atomically.

    Its description is JSON: ``{"classes": [names]}``. A large mask is written as BigTIFF.

    Args:
        path: of the file.
        bands: rows of labels [n, W] uint8, from the first to the last.
        size: (H, W).
        classes: their names.
        colours: theirs, at most 256.
        geographic: tags of :attr:`TiffPicture.geographic`.
        has_gaps: declare the label 255 to be no data, as GDAL does.
        mpp: microns per pixel, written as the resolution.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
        ValueError: the bands have more rows than the mask, which is written without them.
    """
    palette = np.zeros((3, 256), dtype=np.uint16)
    palette[:, : len(colours)] = np.array(colours, dtype=np.uint16).T * 257
    extra = list(geographic)
    if has_gaps:
        extra.append((_NO_DATA, "s", 0, str(NO_DATA), True))
    scale = {} if mpp is None else {"resolution": (1e4 / mpp,) * 2, "resolutionunit": "CENTIMETER"}
    bands = iter(bands)
    # All sweeps are complete when the first band arrives, so a killed run leaves no partial mask.
    bands = itertools.chain([next(bands)], bands)
    with (
        atomic_file(path) as file,
        tifffile.TiffWriter(file, bigtiff=size[0] * size[1] > _BIG) as writer,
    ):
        writer.write(
            _tiles(bands, size),
            shape=size,
            dtype=np.uint8,
            tile=(TILE, TILE),
            compression="zlib",
            photometric="palette",
            colormap=palette,
            description=json.dumps({"classes": list(classes)}),
            metadata=None,
            software="vision-ttt",
            extratags=extra,
            **scale,
        )
    # The writer stops at the last tile. The end of the bands removes the scratch folder, from which
    # a killed run resumes, so that it must come after the mask is written.
    for _ in bands:
        raise ValueError(f"the bands have more rows than the mask, which has {size[0]}")


def _tiles(bands: Iterable[Tensor], size: tuple[int, int]) -> Iterator[np.ndarray]:
    """Cut rows into tiles, one row of tiles at a time. Tiles at the edges may be smaller."""
    height, width = size
    held = torch.empty(0, width, dtype=torch.uint8)
    done = 0
    for band in bands:
        held = torch.cat([held, band])
        while len(held) >= TILE or (len(held) and done + len(held) == height):
            row, held = held[:TILE], held[TILE:]
            done += len(row)
            for left in range(0, width, TILE):
                yield row[:, left : left + TILE].numpy()
