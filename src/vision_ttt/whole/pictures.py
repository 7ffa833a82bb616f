"""Pictures that are read in bands of rows."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vision_ttt.whole.errors import WholePictureError

NO_DATA = 255
"""The label of pixels without data."""
LARGEST_SEGMENT = 2**28
"""The largest tile, strip or chunk of a file in bytes. A larger one is too large for bands."""
_CAN_LEAVE = hasattr(mmap, "MADV_DONTNEED")
_SAMPLED = 64
"""The number of rows whose digest distinguishes a picture from others of the same size."""


def rows_digest(read: Callable[[int], np.ndarray], rows: Iterable[int]) -> str:
    """SHA-256 of rows.

    Args:
        read: row → its content.
        rows: their numbers.
    """
    found = hashlib.sha256()
    for row in rows:
        found.update(np.ascontiguousarray(read(row)).tobytes())
    return found.hexdigest()


def file_identity(path: Path) -> str:
    """A file's path, its size and the time of its last change."""
    status = path.stat()
    return f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"


def level_of(
    path: Path, spacings: Sequence[float | None], level: int | None, mpp: float | None
) -> int:
    """Select the level of a pyramid to read.

    Args:
        path: of the picture, for messages.
        spacings: microns per pixel of each level; None where they are not known.
        level: the level itself.
        mpp: microns per pixel. The coarsest level whose pixels are at most 5 % wider is read. If
            neither ``level`` nor ``mpp`` is given, the level is 0, the full resolution.

    Raises:
        ValueError: there is no such level, both are given, or the pixels' width is not known.
    """
    if level is not None and mpp is not None:
        raise WholePictureError(f"level is {level} and mpp {mpp}; give one of them")
    if level is not None and not 0 <= level < len(spacings):
        raise WholePictureError(f"level is {level}; {path} has the levels 0 to {len(spacings) - 1}")
    if mpp is None:
        return level or 0
    known = {index: each for index, each in enumerate(spacings) if each is not None}
    if not known:
        raise WholePictureError(f"{path} does not say how wide its pixels are; give level")
    fine = [index for index, each in known.items() if each <= 1.05 * mpp]
    if not fine:
        raise WholePictureError(
            f"mpp is {mpp}; the finest pixels of {path} are {min(known.values()):.4g} microns wide"
        )
    return max(fine, key=known.__getitem__)


class TensorPicture:
    """A picture in memory: [C, H, W] floating, normalised.

    Raises:
        TypeError, ValueError: it is another tensor.
    """

    def __init__(self, pixels: Tensor) -> None:
        if pixels.ndim != 3 or 0 in pixels.shape:
            raise WholePictureError(f"a picture must be [C, H, W], got {list(pixels.shape)}")
        if not pixels.is_floating_point():
            raise TypeError(f"a picture must be floating and normalised, got {pixels.dtype}")
        if pixels.device.type != "cpu":
            raise WholePictureError(f"the picture is on {pixels.device}; give it on the CPU")
        self.pixels = pixels.detach()
        self.channels, self.height, self.width = pixels.shape

    @property
    def identity(self) -> str:
        """The digest of all rows."""
        return rows_digest(lambda row: self.pixels[:, row].float().numpy(), range(self.height))

    def read(self, first: int, last: int) -> Tensor:
        """Rows [C, n, W] float32."""
        return self.pixels[:, first:last].float()


class Normalisation:
    """Maps pixels x [n, W, C] to (x / largest - mean) / std, [C, n, W].

    Args:
        mean, std: by channel, of pixels in 0 … 1.
        largest: the largest value of a pixel. By default it is that of the dtype: 255, 65535 or
            32767 for integers, and 1 for floating-point numbers.

    Raises:
        ValueError: they have different lengths, or a deviation is not above 0.
    """

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], largest: float | None = None
    ) -> None:
        if len(mean) != len(std) or not len(mean):
            raise WholePictureError(f"mean and std must be given by channel, got {mean} and {std}")
        if min(std) <= 0 or (largest is not None and largest <= 0):
            raise WholePictureError(f"std and largest must be above 0, got {std} and {largest}")
        self.mean, self.std, self.largest = (*mean,), (*std,), largest

    def __repr__(self) -> str:
        return f"Normalisation({self.mean}, {self.std}, largest={self.largest})"

    def __call__(self, pixels: np.ndarray, has_data: np.ndarray | None = None) -> Tensor:
        """Apply it to rows of pixels [n, W, C].

        Args:
            pixels: the rows.
            has_data: [n, W, C]; where it is False, the result is 0: the pixel is the mean.
        """
        largest = self.largest or largest_of(pixels.dtype)
        x = torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)).astype(np.float32))
        mean, std = (x.new_tensor(each).view(-1, 1, 1) for each in (self.mean, self.std))
        x = x.sub_(mean * largest).div_(std * largest)
        if has_data is not None:
            x[torch.from_numpy(~has_data.transpose(2, 0, 1))] = 0
        return x


def largest_of(dtype: np.dtype) -> float:
    """The largest pixel of a dtype.

    Raises:
        TypeError: pixels of this dtype are not accepted.
    """
    native = np.dtype(dtype).newbyteorder("=")
    if native in (np.uint8, np.uint16, np.int16):
        return float(np.iinfo(dtype).max)
    if native in (np.float32, np.float16):
        return 1.0
    raise TypeError(f"pixels are {dtype}; accepted: uint8, uint16, int16, float16, float32")


class ArrayPicture:
    """Pixels [H, W, C] or [H, W] of a NumPy array or memory map, normalised as they are read.

    Args:
        pixels: uint8, uint16, int16, float16 or float32; a map of a .npy file is
            ``numpy.load(path, mmap_mode="r")``.
        normalisation: of the pixels.

    Raises:
        TypeError, ValueError: they are no such pixels, or the normalisation is of other channels.
    """

    def __init__(self, pixels: np.ndarray, normalisation: Normalisation) -> None:
        largest_of(pixels.dtype)
        if pixels.ndim == 2:
            pixels = pixels[..., None]
        if pixels.ndim != 3 or 0 in pixels.shape:
            raise WholePictureError(f"a picture must be [H, W, C], got {list(pixels.shape)}")
        check_channels(pixels.shape[2], normalisation)
        self.pixels, self.normalisation = pixels, normalisation
        self.height, self.width, self.channels = pixels.shape

    @property
    def identity(self) -> str:
        """The digest of all rows in memory; of a map, its file's identity and some rows."""
        mapped = _map_of(self.pixels)
        if mapped is None:
            return rows_digest(self.pixels.__getitem__, range(self.height))
        rows = np.unique(np.linspace(0, self.height - 1, _SAMPLED).astype(int)).tolist()
        some = rows_digest(self.pixels.__getitem__, rows)
        # A map of an open file that has no name has none either.
        return some if mapped.filename is None else f"{file_identity(Path(mapped.filename))} {some}"

    def read(self, first: int, last: int) -> Tensor:
        """Rows [C, n, W] float32, normalised."""
        x = self.normalisation(np.asarray(self.pixels[first:last]))
        if isinstance(self.pixels, np.memmap) and self.pixels.mode == "r" and _CAN_LEAVE:
            # Otherwise pages that were read would count as resident memory until the process ends.
            self.pixels._mmap.madvise(mmap.MADV_DONTNEED)
        return x


def _map_of(pixels: np.ndarray) -> np.memmap | None:
    """The memory map whose pixels these are; None where they are in memory."""
    each: object = pixels
    while isinstance(each, np.ndarray):
        # A copy of a memory map is also an np.memmap, but maps no file.
        if isinstance(each, np.memmap) and each._mmap is not None:
            return each
        each = each.base
    return None


def check_channels(channels: int, normalisation: Normalisation) -> None:
    """Require a normalisation of so many channels.

    Raises:
        ValueError: it is of another number.
    """
    if len(normalisation.mean) != channels:
        raise WholePictureError(
            f"the picture has {channels} channels, and mean and std are given for"
            f" {len(normalisation.mean)}"
        )
