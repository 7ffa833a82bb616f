"""The sample pictures of the page: what the installed packages bring along, nothing fetched."""

from __future__ import annotations

from pathlib import Path

import skimage.data
from PIL import Image

from vision_ttt.app.uploads import reduced
from vision_ttt.data import open_image
from vision_ttt.data.sample_images import sample_images

PHOTOGRAPHS = {
    "astronaut": "astronaut.png",
    "cat": "chelsea.png",
    "coffee": "coffee.png",
    "rocket": "rocket.jpg",
    "camera": "camera.png",
    "coins": "coins.png",
}
"""Name → file of scikit-image. Its functions might fetch pictures; these files are in its wheel."""
OTHERS = ("china", "flower", "digit-3", "digit-8", "scene-0", "scene-1")
"""Of :func:`vision_ttt.data.sample_images.sample_images`: photographs, digits, rendered scenes."""


def open_samples() -> dict[str, Image.Image]:
    """Return the sample pictures by name, RGB, in the order of the page."""
    folder = Path(skimage.data.__file__).parent
    pictures = {name: open_image(folder / file) for name, file in PHOTOGRAPHS.items()}
    for name in OTHERS:
        pictures |= {each.name: each.open() for each in sample_images(name)}
    return {name: reduced(picture) for name, picture in pictures.items()}
