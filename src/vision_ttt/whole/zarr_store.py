"""OME-Zarr pictures, read in bands of rows, and tokens written as Zarr."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from torch import Tensor

from vision_ttt.file_kinds import check_regular, read_regular
from vision_ttt.files import sync_folder
from vision_ttt.whole.errors import WholePictureError, naming
from vision_ttt.whole.pictures import (
    LARGEST_SEGMENT,
    Normalisation,
    check_channels,
    largest_of,
    level_of,
)

_MICRONS = {"nanometer": 1e-3, "micrometer": 1.0, "millimeter": 1e3, "angstrom": 1e-4}
_CHUNK = 4096
"""The approximate number of tokens of a chunk that is written."""
_LARGEST_DESCRIPTION = 2**24  # bytes
_FEATURE_AXES = ("y", "x", "feature")


class ZarrPicture:
    """One level of an OME-Zarr picture (0.1 to 0.5) in a folder, decoded as its rows are read.

    Its axes c, y and x may have any order, and c may be missing; other axes must have the length 1.

    Args:
        path: of the folder, whose first multiscale is read.
        normalisation: of its channels.
        level: of the multiscale; 0 is the full resolution, and the default.
        mpp: microns per pixel, instead of ``level``. The coarsest level whose pixels are at most
            5 % wider is read.

    Attributes:
        mpp: microns per pixel of the level; None where the picture does not say it.

    Raises:
        WholePictureError: it is no such folder, has no such level, or has other channels or pixels.
        FileNotFoundError: there is no folder.
    """

    def __init__(
        self,
        path: str | Path,
        normalisation: Normalisation,
        *,
        level: int | None = None,
        mpp: float | None = None,
    ) -> None:
        self.path, self.normalisation = Path(path), normalisation
        with naming(self.path, "OME-Zarr"):
            files = _files(self.path)
            group = zarr.open_group(self.path, mode="r")
            said = group.attrs.get("ome", group.attrs)
            if "bioformats2raw.layout" in said:
                raise WholePictureError(
                    f"{self.path} is a collection of bioformats2raw; name one of its pictures,"
                    f" such as {self.path / '0'}"
                )
            if "multiscales" not in said:
                raise WholePictureError(f"{self.path} has no multiscales: it is no OME-Zarr")
            scales: Any = said["multiscales"][0]
            datasets = scales["datasets"]
            arrays = [group[each["path"]] for each in datasets]
            axes = [
                each if isinstance(each, Mapping) else {"name": each}
                for each in scales.get("axes") or "tczyx"[-arrays[0].ndim :]
            ]
            names = [each["name"] for each in axes]
            _check_axes(self.path, names, arrays[0].shape)
            spacings = [_spacing((each, scales), axes) for each in datasets]
            self.level = level_of(self.path, spacings, level, mpp)
            self.mpp = spacings[self.level]
            self._array = arrays[self.level]
            self._check(names)
        digest = hashlib.sha256("\n".join(files).encode(errors="surrogateescape")).hexdigest()
        self.identity = f"{self.path.resolve()} {self.level} {digest}"
        try:
            largest_of(self._array.dtype)
            check_channels(self.channels, normalisation)
        except (TypeError, ValueError) as error:
            raise WholePictureError(f"{self.path}: {error}") from error

    def read(self, first: int, last: int) -> Tensor:
        """Rows [C, n, W] float32, normalised."""
        index = {"y": slice(first, last), "x": slice(None), "c": slice(None)}
        with naming(self.path, "OME-Zarr"):
            pixels = np.asarray(self._array[tuple(index.get(name, 0) for name in self._names)])
        kept = [name for name in self._names if name in index]
        pixels = pixels.transpose([kept.index(name) for name in "yxc" if name in kept])
        return self.normalisation(pixels if pixels.ndim == 3 else pixels[..., None])

    def _check(self, names: list[str]) -> None:
        """Refuse chunks that are too large for bands."""
        array, self._names = self._array, names
        sizes = dict(zip(names, array.shape, strict=True))
        self.height, self.width, self.channels = sizes["y"], sizes["x"], sizes.get("c", 1)
        chunk = math.prod(array.chunks) * array.dtype.itemsize
        # Zarr decodes ten chunks at once, and also holds the encoded content of each.
        self.memory = 2**26 + 20 * chunk
        if chunk > LARGEST_SEGMENT:
            raise WholePictureError(
                f"{self.path} has chunks of {list(array.chunks)}, each of which is decoded as a "
                "whole: write it again in chunks of 256 × 256"
            )


def _holds_features(path: Path) -> bool:
    """Whether a folder is an array that :func:`write_features` has written."""
    try:
        said = json.loads(read_regular(path / "zarr.json", _LARGEST_DESCRIPTION))
    except (OSError, ValueError):
        return False
    return isinstance(said, dict) and said.get("dimension_names") == list(_FEATURE_AXES)


def _files(folder: Path) -> list[str]:
    """Names, sizes and times of a folder's files. A file that is not regular raises an error."""
    if not folder.is_dir():
        folder.stat()
        raise WholePictureError(f"{folder} is no folder; an OME-Zarr picture is one")
    found = []
    for path in sorted(folder.rglob("*")):
        if not path.is_dir():
            check_regular(path)
            status = path.stat()
            found.append(f"{path.relative_to(folder)} {status.st_size} {status.st_mtime_ns}")
    return found


def _check_axes(path: Path, names: list[str], shape: tuple[int, ...]) -> None:
    sizes = dict(zip(names, shape, strict=True))
    long = [name for name in sizes if name not in "cyx" and sizes[name] != 1]
    if not {"y", "x"} <= {*names} or long or not math.prod(shape):
        shown = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise WholePictureError(
            f"{path} has the axes {shown}; accepted: y, x, c, and others of length 1"
        )


def _spacing(said: Iterable[Mapping[str, Any]], axes: list[Mapping[str, Any]]) -> float | None:
    """Microns per pixel along x by the metadata of a level and of all levels; None if unknown."""
    place = [axis["name"] for axis in axes].index("x")
    scales = [
        float(transform["scale"][place])
        for each in said
        for transform in each.get("coordinateTransformations", ())
        if transform["type"] == "scale"
    ]
    unit = _MICRONS.get(axes[place].get("unit", ""))
    return unit * math.prod(scales) if scales and unit is not None else None


def write_features(
    path: Path,
    bands: Iterable[tuple[slice, Tensor]],
    rows: int,
    *,
    dtype: torch.dtype = torch.float16,
    about: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """Write tokens as a Zarr array (format 3) [rows, columns, D], whole or not at all.

    Args:
        path: of the folder. An existing folder of tokens is replaced.
        bands: rows and their tokens [n, w, D], as :meth:`WholePictures.tokens` yields them.
        rows: of the token grid.
        dtype: float16 or float32.
        about: attributes of the array.

    Returns:
        The array's shape.

    Raises:
        ValueError: a number is not finite in this dtype, the dtype is another, or something else is
            at the path.
        OSError: the disk is full, or the folder cannot be written.
    """
    if dtype not in (torch.float16, torch.float32):
        raise WholePictureError(f"dtype is {dtype}; accepted: torch.float16, torch.float32")
    if path.exists() and not _holds_features(path):
        raise WholePictureError(f"{path} holds no tokens written before; name another folder")
    path = path.resolve()  # the folder that a link names
    part, array = path.with_name(f".{path.name}.part"), None
    try:
        for place, tokens in bands:
            if array is None:
                # A killed process may have left this folder. It is removed only now: a run that is
                # refused because another one works in its scratch folder yields no band.
                shutil.rmtree(part, ignore_errors=True)
                high, wide, dim = tokens.shape
                array = zarr.create_array(
                    part,
                    shape=(rows, wide, dim),
                    # A band is a row of chunks: none is written twice.
                    chunks=(high, min(wide, max(_CHUNK // high, 1)), dim),
                    dtype=str(dtype).removeprefix("torch."),
                    dimension_names=_FEATURE_AXES,
                    attributes=dict(about or {}),
                )
            numbers = tokens.to(dtype)
            if not numbers.isfinite().all():
                raise WholePictureError(f"a token is not finite in {dtype}")
            array[place] = numbers.numpy()
            if place.stop >= rows:  # before the bands end, which removes their scratch folder
                if path.exists():
                    shutil.rmtree(path)
                part.rename(path)
    finally:
        if array is not None:
            shutil.rmtree(part, ignore_errors=True)
    sync_folder(path.parent)
    return array.shape
