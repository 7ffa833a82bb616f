"""Labels of pixels in the rows of a results file: a PNG in base64."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

import numpy as np
from PIL import Image

from studies.letters.rendered_folder import encoded
from vision_ttt.tasks.segmentation.pictures import class_colours, coloured


def packed(labels: np.ndarray, classes: Sequence[str]) -> str:
    """Return labels [h, w] uint8 as a string."""
    content = encoded(coloured(labels, class_colours(classes)), "PNG", optimize=True)
    return base64.b64encode(content).decode()


def unpacked(labels: str) -> np.ndarray:
    """Return the labels [h, w] of a string that :func:`packed` returned."""
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(labels))))
