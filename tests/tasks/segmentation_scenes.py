"""A tiny segmentation dataset on disk: coloured rectangles of three classes."""

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("ground", "red thing", "blue thing")
_LEVELS = np.array([[90, 140, 90], [200, 60, 60], [60, 60, 200]])


def write_scenes(root: Path, *, train: int = 8, test: int = 5, side: int = 40) -> Path:
    """Write images and masks in ADE20K's layout, and their class names; return `root`.

    Images are about `side` pixels in height and wider; the top row has no class.
    """
    generator = np.random.default_rng(0)
    for split, count in (("training", train), ("validation", test)):
        images, masks = root / "images" / split, root / "annotations" / split
        images.mkdir(parents=True)
        masks.mkdir(parents=True)
        for index in range(count):
            labels = np.zeros((side, side + 4 * (index % 3)), dtype=np.int64)
            for label in (1, 2):
                top, left = generator.integers(0, side // 2, 2)
                labels[top : top + side // 2, left : left + side // 2] = label
            noise = generator.normal(0, 20, (*labels.shape, 3))
            pixels = np.clip(_LEVELS[labels] + noise, 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(images / f"{index}.jpg", quality=95)
            stored = (labels + 1).astype(np.uint8)
            stored[0] = 0
            Image.fromarray(stored).save(masks / f"{index}.png")
    (root / "classes.txt").write_text("\n".join(CLASSES) + "\n")
    return root
