"""Small sets of images with objects in COCO's format, made in the tests' folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

CATEGORIES = [{"id": 7, "name": "disc"}, {"id": 3, "name": "square"}]
"""By label they are square (1), disc (2): ids need not ascend in the file, nor begin at 1."""
_COLOURS = {7: (230, 60, 40), 3: (40, 90, 230)}


def annotation(
    number: int, image: int, category: int, polygon: list[float], **changes: Any
) -> dict[str, Any]:
    """An annotation whose box and area follow from its polygon; `changes` replace its fields."""
    points = np.array(polygon).reshape(-1, 2)
    x, y = points.min(axis=0).tolist()
    width, height = (points.max(axis=0) - points.min(axis=0)).tolist()
    turned = np.roll(points, -1, axis=0)
    area = abs((points[:, 0] * turned[:, 1] - points[:, 1] * turned[:, 0]).sum()) / 2
    return {
        "id": number,
        "image_id": image,
        "category_id": category,
        "bbox": [x, y, width, height],
        "area": float(area),
        "iscrowd": 0,
        "segmentation": [polygon],
        **changes,
    }


def rectangle(x: float, y: float, width: float, height: float) -> list[float]:
    """The polygon of a rectangle."""
    return [x, y, x + width, y, x + width, y + height, x, y + height]


def octagon(x: float, y: float, radius: float) -> list[float]:
    """The polygon of an octagon around a point."""
    turns = np.arange(8) * np.pi / 4
    return np.stack([x + radius * np.cos(turns), y + radius * np.sin(turns)], 1).ravel().tolist()


def write_part(root: Path, part: str, count: int, seed: int, size: tuple[int, int]) -> Path:
    """Write images of one to three objects, and the COCO file of them; return the file's path.

    Every fifth image has no object, the second one a crowd region, too.

    Args:
        size: width and height of the images.
    """
    generator = np.random.default_rng(seed)
    folder = root / f"{part}2017"
    folder.mkdir(parents=True)
    images, annotations = [], []
    for number in range(1, count + 1):
        pixels = generator.normal(120, 12, (size[1], size[0], 3)).clip(0, 255).astype(np.uint8)
        picture = Image.fromarray(pixels)
        draw = ImageDraw.Draw(picture)
        for _ in range(0 if number % 5 == 0 else generator.integers(1, 4)):
            category = [3, 7][generator.integers(2)]
            radius = generator.uniform(0.12, 0.25) * min(size)
            x, y = (generator.uniform(radius, side - radius) for side in size)
            shape = octagon(x, y, radius)
            if category == 3:
                shape = rectangle(x - radius, y - radius, 2 * radius, 2 * radius)
            draw.polygon(shape, fill=_COLOURS[category])
            annotations.append(annotation(len(annotations) + 1, number, category, shape))
        if number == 2:
            counts = [0, size[1] * 3, size[1] * (size[0] - 3)]
            annotations.append(
                annotation(
                    len(annotations) + 1,
                    number,
                    7,
                    rectangle(0, 0, 3, size[1]),
                    iscrowd=1,
                    segmentation={"size": [size[1], size[0]], "counts": counts},
                )
            )
        name = f"{number:012d}.png"
        picture.save(folder / name)
        images.append({"id": number, "file_name": name, "width": size[0], "height": size[1]})
    return write_file(root, part, images, annotations)


def write_file(root: Path, part: str, images: list[Any], annotations: list[Any]) -> Path:
    """Write a COCO file where COCO 2017 has it; return its path."""
    path = root / "annotations" / f"instances_{part}2017.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"images": images, "annotations": annotations, "categories": CATEGORIES}
    path.write_text(json.dumps(content))
    return path


def write_set(
    root: Path, *, train: int = 8, test: int = 6, size: tuple[int, int] = (64, 48)
) -> Path:
    """Write both parts of a set and return its folder."""
    write_part(root, "train", train, 0, size)
    write_part(root, "val", test, 1, size)
    return root
