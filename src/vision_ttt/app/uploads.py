"""Visitors' files as pictures: what is too large or broken is refused with a sentence."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from vision_ttt.data import ImageError, open_image
from vision_ttt.data.images import decoded

LARGEST_FILE = 20 * 2**20
"""Bytes."""
LARGEST_PICTURE = 40_000_000
"""Pixels. A small file can decode to more pixels than fit into memory."""
LONGEST_SIDE = 2048
"""Longer side in pixels that pictures are reduced to. No model looks at more pixels, and the
picture of every visitor stays in memory."""


def open_upload(path: str | Path) -> Image.Image:
    """Decode a visitor's file into an RGB picture, upright as cameras mark it, and not too large.

    Errors call the file by its name, without the folder that it was uploaded to.

    Raises:
        ImageError: the file is too large, has too many pixels, or does not decode.
    """
    path = Path(path)
    name = path.name
    size = path.stat().st_size
    if size > LARGEST_FILE:
        raise ImageError(
            name, f"the file has {size / 2**20:.1f} MB; at most {LARGEST_FILE >> 20} are accepted"
        )
    with decoded(path, name) as image:  # reads the header alone
        width, height = image.size
    if width * height > LARGEST_PICTURE:
        raise ImageError(
            name,
            f"it has {width} × {height} pixels, {width * height / 1e6:.0f} million; at most"
            f" {LARGEST_PICTURE // 10**6} million are accepted",
        )
    return reduced(open_image(path, name))


def reduced(picture: Image.Image) -> Image.Image:
    """Return a picture whose longer side is at most `LONGEST_SIDE`, the same one where it is."""
    if max(picture.size) <= LONGEST_SIDE:
        return picture
    scale = LONGEST_SIDE / max(picture.size)
    width, height = (max(round(scale * side), 1) for side in picture.size)
    return picture.resize((width, height), Image.Resampling.LANCZOS)
