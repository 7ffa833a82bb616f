"""Opening image files: every failure names the file."""

import struct
import zlib
from pathlib import Path
from typing import BinaryIO

from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS

from vision_ttt.errors import UserError

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


class ImageError(UserError, ValueError):
    """An image that does not decode. `name` is its file or its place in the dataset."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"cannot decode image {name}: {reason}")
        self.name = name
        self.reason = reason

    def __reduce__(self) -> tuple:
        return type(self), (self.name, self.reason)  # so that worker processes can send it


def open_image(source: str | Path | BinaryIO, name: str | None = None) -> Image.Image:
    """Decode an image file into an 8-bit RGB image; errors call it `name` (default: its path).

    Raises:
        FileNotFoundError: there is no such file.
        ImageError: the file is empty, truncated, corrupt, too large or no image.
    """
    name = str(source) if name is None else name
    try:
        with Image.open(source) as image:
            if image.mode.startswith("I"):
                return _from_16_bit(image)
            return image.convert("RGB")
    except FileNotFoundError:
        raise
    except _DECODING_ERRORS as error:
        raise ImageError(name, _reason(error)) from error


def find_images(folder: str | Path) -> list[Path]:
    """Return all image files under `folder`, sorted.

    Raises:
        ImageError: there are none.
    """
    paths = sorted(
        path
        for path in Path(folder).rglob("*")
        if path.is_file() and path.suffix.lower() in IMG_EXTENSIONS
    )
    if not paths:
        raise ImageError(
            str(folder), f"no image in the folder (accepted: {', '.join(IMG_EXTENSIONS)})"
        )
    return paths


def _from_16_bit(image: Image.Image) -> Image.Image:
    """Scale 16-bit grey levels to 8 bits; Pillow's own conversion would clip them to white."""
    return image.convert("I").point(lambda level: level / 256).convert("L").convert("RGB")


def _reason(error: Exception) -> str:
    message = str(error).strip()
    if isinstance(error, Image.UnidentifiedImageError):
        return "not an image format that Pillow knows, or the file is damaged"
    return message or type(error).__name__
