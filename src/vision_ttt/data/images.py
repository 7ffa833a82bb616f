"""Opening image files: every failure names the file."""

import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import ExifTags, Image, ImageOps

from vision_ttt.errors import DamagedItem, reason_of
from vision_ttt.file_kinds import UnreadableFile, check_regular

LARGEST_IMAGE_FILE = 2**31
"""Bytes: more than the most pixels that Pillow decodes have; some formats are read whole."""
_WHITE_IS_ZERO = 0
"""TIFF's photometric interpretation of such grey levels; Pillow inverts those of 8 bits only."""
_WITH_ALPHA = ("LA", "La", "PA", "RGBA", "RGBa")

# What Pillow reads by itself. For others, such as EPS, it starts a program on the file.
FORMATS = ("PNG", "JPEG", "WEBP", "TIFF", "BMP", "PPM", "GIF", "JPEG2000", "AVIF")

# What Pillow's readers raise on damaged files; OSError covers unidentified and truncated ones.
_DECODING_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    TypeError,
    OverflowError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)


class ImageError(DamagedItem):
    """An image that does not decode. `name` is its file or its place in the dataset."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"cannot decode image {name}: {reason}", name)
        self.reason = reason

    def __reduce__(self) -> tuple:
        return type(self), (self.name, self.reason)  # so that worker processes can send it


def open_image(
    source: str | Path | BinaryIO, name: str | None = None, *, upright: bool = True
) -> Image.Image:
    """Decode an image file into an 8-bit RGB image; errors call it `name` (default: its path).

    What is transparent becomes white, and grey levels of 12 and 16 bits are scaled to 8.

    Args:
        upright: turn the image as its EXIF orientation says; False: the pixels as they are stored.

    Raises:
        FileNotFoundError: there is no such file.
        ImageError: the file is empty, truncated, corrupt or too large, is no image of `FORMATS`,
            has grey levels without a known range, or is not a regular file, e.g. a named pipe.
    """
    name = str(source) if name is None else name
    with decoded(source, name) as image:
        if upright:
            _turn_upright(image)
        if image.mode == "F" or image.mode.startswith("I"):
            return _from_grey_levels(image, name)
        if image.mode in _WITH_ALPHA or "transparency" in image.info:
            return _on_white(image)
        return image.convert("RGB")


def open_listed(source: str | Path) -> Image.Image:
    """Decode an image that a listing names: where there is no such file, it is a damaged item.

    Raises:
        ImageError: as `open_image`; or the file was removed since, or is a link to nothing.
    """
    try:
        return open_image(source)
    except FileNotFoundError as error:
        raise ImageError(str(source), "there is no such file (any more)") from error


def open_labelled(source: Path, size: tuple[int, int]) -> Image.Image:
    """Decode an image that has boxes or masks, which are of this size (width, height).

    The boxes and masks of COCO belong to the pixels as they are stored; those of other data may
    belong to the upright image. The upright image is returned only if it has the given size and the
    stored one does not. Errors are those of :func:`open_image`.
    """
    stored = open_image(source, upright=False)
    if stored.size == size:
        return stored
    upright = open_image(source)
    return upright if upright.size == size else stored


@contextmanager
def decoded(source: str | Path | BinaryIO, name: str) -> Iterator[Image.Image]:
    """Open an image file, to be read within the context; errors of both call it `name`.

    Raises:
        FileNotFoundError, ImageError: as `open_image`.
    """
    try:
        if isinstance(source, str | Path):
            check_regular(source, LARGEST_IMAGE_FILE)
        with Image.open(source, formats=_readable()) as image:
            yield image
    except (FileNotFoundError, ImageError):
        raise
    except UnreadableFile as error:
        raise ImageError(name, error.reason) from error
    except _DECODING_ERRORS as error:
        raise ImageError(name, _reason(error)) from error


@cache
def _readable() -> tuple[str, ...]:
    """Those of FORMATS that this Pillow was built with."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _turn_upright(image: Image.Image) -> None:
    image.load()  # so that what fails below is the EXIF data alone; the pixels are whole
    with suppress(*_DECODING_ERRORS):
        ImageOps.exif_transpose(image, in_place=True)


def _on_white(image: Image.Image) -> Image.Image:
    """Without this, the colours that nobody sees would show."""
    layers = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layers.size, "white"), layers).convert("RGB")


def _from_grey_levels(image: Image.Image, name: str) -> Image.Image:
    """Scale 12- or 16-bit grey levels to 8 bits; Pillow's own conversion would clip them to white.

    32-bit integers are read as 16-bit levels if they are from 0 to 65,535 and some exceed 255.
    Transparent pixels become white; levels of a TIFF in which 0 is white are inverted.
    """
    if image.mode in ("F", "I"):
        low, high = image.getextrema()
        if image.mode == "F" or not (low >= 0 and 256 <= high < 2**16):
            raise ImageError(
                name,
                f"its grey levels are 32-bit numbers from {low:g} to {high:g}, which leaves open"
                " what is white; accepted: 8, 12 or 16 bits",
            )
    levels = np.asarray(image.convert("I"))
    tags = getattr(image, "tag_v2", {})
    bits = min(16, *tags.get(ExifTags.Base.BitsPerSample, (16,)))
    grey = (levels >> bits - 8).astype(np.uint8)
    if tags.get(ExifTags.Base.PhotometricInterpretation) == _WHITE_IS_ZERO:
        grey = 255 - grey
    if "transparency" in image.info:
        grey[levels == image.info["transparency"]] = 255
    return Image.fromarray(grey).convert("RGB")


def _reason(error: Exception) -> str:
    if isinstance(error, Image.UnidentifiedImageError):
        return f"not an image of {', '.join(_readable())}, or the file is damaged"
    return reason_of(error)
