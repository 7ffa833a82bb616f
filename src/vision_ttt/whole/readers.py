"""Selects the reader that opens a picture's file."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vision_ttt.extras import require
from vision_ttt.file_kinds import check_regular
from vision_ttt.whole.embedding import Picture
from vision_ttt.whole.errors import WholePictureError
from vision_ttt.whole.pictures import ArrayPicture, Normalisation


class _Reader(NamedTuple):
    opens: str
    """Its class or function, as module:name."""
    suffixes: tuple[str, ...]
    """Suffixes of the files that it reads by default."""
    extra: str | None = None
    """The extra that installs its library."""
    options: tuple[str, ...] = ()
    """Arguments in addition to the path and the normalisation."""


READERS = {
    "array": _Reader("vision_ttt.whole.readers:_array", (".npy",)),
    "tiff": _Reader("vision_ttt.whole.tiff:TiffPicture", (".tif", ".tiff"), "large"),
    "raster": _Reader(
        *("vision_ttt.whole.raster:RasterPicture", (".jp2", ".vrt", ".img"), "geo", ("bands",))
    ),
    "slide": _Reader(
        "vision_ttt.whole.slides:SlidePicture",
        (".svs", ".ndpi", ".mrxs", ".scn", ".bif", ".svslide", ".vms", ".vmu"),
        *("slides", ("level", "mpp")),
    ),
    "zarr": _Reader(
        *("vision_ttt.whole.zarr_store:ZarrPicture", (".zarr",), "zarr", ("level", "mpp"))
    ),
}
"""Readers by name. A reader that is requested by name opens files with any suffix."""


def open_picture(
    path: str | Path,
    normalisation: Normalisation,
    *,
    reader: str | None = None,
    bands: Sequence[int] | None = None,
    level: int | None = None,
    mpp: float | None = None,
) -> Picture:
    """Open a picture by the reader of its kind, to be read in bands of rows.

    The name's suffix selects the reader. A TIFF file with GeoTIFF's tags is read by "raster" where
    rasterio is installed, or where ``bands`` are given.

    Args:
        path: of the file, or of the folder of an OME-Zarr picture.
        normalisation: of its channels.
        reader: a name in :data:`READERS`, whatever the suffix.
        bands: of a raster, see :class:`vision_ttt.whole.raster.RasterPicture`.
        level, mpp: of a slide or an OME-Zarr picture, see
            :class:`vision_ttt.whole.slides.SlidePicture`.

    Raises:
        MissingPackageError: the reader's library is not installed; names what to install.
        ValueError: no reader has this name or suffix, the reader has no such argument, or the file
            is refused.
        FileNotFoundError: there is no file.
    """
    path = Path(path)
    options = {"bands": bands, "level": level, "mpp": mpp}
    given = {name: value for name, value in options.items() if value is not None}
    name = reader_of(path, reader, raster="bands" in given)
    chosen = READERS[name]
    for option in given:
        if option not in chosen.options:
            fit = [other for other, each in READERS.items() if option in each.options]
            raise WholePictureError(
                f"{option} is not for {path}, which the reader {name} opens; it is for the readers "
                f"{', '.join(fit)}"
            )
    if chosen.extra is not None:
        require(chosen.extra, f"the reader {name}")
    module, _, function = chosen.opens.partition(":")
    return getattr(import_module(module), function)(path, normalisation, **given)


def reader_of(path: Path, reader: str | None = None, *, raster: bool = False) -> str:
    """The name of the reader that opens a file.

    Args:
        path: of the file.
        reader: the one that is asked for.
        raster: read GeoTIFF by "raster", whether rasterio is installed or not.

    Raises:
        ValueError: no reader has this name or suffix.
    """
    if reader is not None:
        if reader not in READERS:
            raise WholePictureError(f"reader is {reader!r}; accepted: {', '.join(READERS)}")
        return reader
    suffix = path.suffix.lower()
    found = [name for name, each in READERS.items() if suffix in each.suffixes]
    if not found:
        kinds = "; ".join(
            f"{name} {' '.join(each.suffixes)}"
            + (f" (pip install 'vision-ttt[{each.extra}]')" if each.extra else "")
            for name, each in READERS.items()
        )
        raise WholePictureError(f"no reader is for {path}; accepted: {kinds}; or name a reader")
    if found == ["tiff"] and (raster or find_spec("rasterio") is not None):
        require("large", "the reader tiff")
        if import_module("vision_ttt.whole.tiff").is_geographic(path):
            return "raster"
    return found[0]


def _array(path: Path, normalisation: Normalisation) -> ArrayPicture:
    check_regular(path)
    try:
        pixels = np.lib.format.open_memmap(path, mode="r")
    except ValueError as error:
        raise WholePictureError(f"{path} is no array of numbers: {error}") from error
    try:
        return ArrayPicture(pixels, normalisation)
    except (TypeError, ValueError) as error:
        raise WholePictureError(f"{path}: {error}") from error
