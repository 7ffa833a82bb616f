"""The embedded set of scenes: objects for detection and segmentation, rendered on disk.

A folder holds the same pictures in two layouts:

    coco/train2017/000000000001.jpg …          coco/val2017/ …
    coco/annotations/instances_train2017.json  …/instances_val2017.json
    ade/images/training/scene_train_00000001.jpg …       ade/images/validation/ …
    ade/annotations/training/scene_train_00000001.png …  ade/annotations/validation/ …
    ade/objectInfo150.txt                      the masks' classes, in the file that ADE20K has
    objects/train/disc/00000000.png …   objects/val/…    single objects by class, to classify
    manifest.json                              what was rendered

Colours, textures, places, sizes (over a factor of 8), occlusion and digits' scans are random; image
i of a split depends on (seed, split, i) and the size alone, on one machine bit for bit.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import faster_coco_eval.core.mask as rle_masks
import numpy as np
from PIL import Image

from vision_ttt.data.scene_images import SPLITS, Instance, Scene, Split, render_object, render_scene
from vision_ttt.data.scene_shapes import CLASSES
from vision_ttt.data.shards import DatasetError
from vision_ttt.file_kinds import read_regular

VERSION = 3
"""Version of what is drawn. Another version draws other pictures from the same seed."""
ADE_CLASSES = ("background", *(each.name for each in CLASSES))
"""The classes of the ADE-style masks by value, from 1; 0 stands for pixels without a class."""

_COCO = {"train": "train2017", "test": "val2017"}
_ADE = {"train": "training", "test": "validation"}
_ADE_NAMES = {"train": "scene_train", "test": "scene_val"}
_OBJECTS = {"train": "train", "test": "val"}
_FIRST_ID = {"train": 1, "test": 1_000_001}  # of images; the splits share none
_ANNOTATIONS_PER_IMAGE = 100  # at most; their ids follow from the image's
_LARGEST_MANIFEST = 2**20  # bytes


@dataclass(frozen=True, kw_only=True)
class SceneSettings:
    """What a set of scenes is rendered from.

    Args:
        side: of the images, in pixels.
        train_images, test_images: how many.
        object_side: of the pictures of single objects, in pixels.
        train_objects, test_objects: how many.
        seed: of everything random.

    Raises:
        ValueError: a value is out of its range.
    """

    side: int = 128
    train_images: int
    test_images: int
    seed: int = 0
    object_side: int = 48
    train_objects: int
    test_objects: int

    def __post_init__(self) -> None:
        least = {"side": 64, "object_side": 32, "seed": 0}
        for name, value in vars(self).items():
            lowest = least.get(name, 1)
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                raise ValueError(f"{name} is {value!r}; it must be a whole number ≥ {lowest}")

    def count(self, split: Split, kind: Literal["images", "objects"] = "images") -> int:
        """The number of scenes, or of pictures of single objects, of a split."""
        return getattr(self, f"{split}_{kind}")


def render_scenes(
    folder: Path,
    settings: SceneSettings,
    progress: Callable[[int], None] = lambda scenes: None,
) -> None:
    """Render a set into a folder, or find it complete; one process at a time.

    Args:
        folder: new, empty or that of this set. It is there whole or not at all.
        progress: called with the number of scenes that are there.

    Raises:
        DatasetError: the folder holds a set of other settings, or something else.
        OSError: the folder cannot be written.
    """
    asked = {"version": VERSION, **dataclasses.asdict(settings)}
    if _holds(folder, asked):
        progress(settings.train_images + settings.test_images)
        return
    part = folder.with_name(f".{folder.name}.part")
    if part.exists():  # left by a process that was killed
        shutil.rmtree(part)
    for split in SPLITS:
        _render_split(part, settings, split, progress)
        _render_objects(part / "objects" / _OBJECTS[split], settings, split)
    lines = ["Idx\tName", *(f"{n}\t{name}" for n, name in enumerate(ADE_CLASSES, start=1)), ""]
    (part / "ade" / "objectInfo150.txt").write_text("\n".join(lines), encoding="utf-8")
    (part / "manifest.json").write_text(json.dumps(asked), encoding="utf-8")
    if folder.exists():
        folder.rmdir()
    os.replace(part, folder)


def _holds(folder: Path, asked: dict[str, Any]) -> bool:
    """Whether a folder holds the set that is asked for; False where there is nothing."""
    if not folder.exists() or not any(folder.iterdir()):
        return False
    manifest = folder / "manifest.json"
    try:
        found = dict(json.loads(read_regular(manifest, _LARGEST_MANIFEST)))
    except FileNotFoundError as error:
        others = ", ".join(sorted(each.name for each in folder.iterdir())[:5])
        raise DatasetError(f"{folder} holds no set of scenes, but {others}") from error
    except (ValueError, TypeError) as error:
        raise DatasetError(f"{manifest} is damaged: {error}") from error
    differences = [
        f"{key} {found.get(key)} (not {asked.get(key)})"
        for key in sorted(asked.keys() | found.keys())
        if found.get(key) != asked.get(key)
    ]
    if differences:
        raise DatasetError(
            f"{folder} holds another set of scenes: {', '.join(differences)}; choose another"
            " folder, or remove it"
        )
    return True


def _render_split(
    folder: Path, settings: SceneSettings, split: Split, progress: Callable[[int], None]
) -> None:
    """Write the scenes of a split in both layouts."""
    coco, told = folder / "coco" / _COCO[split], folder / "coco" / "annotations"
    pictures, masks = (folder / "ade" / kind / _ADE[split] for kind in ("images", "annotations"))
    for each in (coco, told, pictures, masks):
        each.mkdir(parents=True, exist_ok=True)
    done = 0 if split == "train" else settings.train_images
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for index in range(settings.count(split)):
        scene = render_scene(settings.seed, split, index, settings.side)
        image_id = _FIRST_ID[split] + index
        name = f"{image_id:012d}.jpg"
        stem = f"{_ADE_NAMES[split]}_{index + 1:08d}"
        buffer = io.BytesIO()
        scene.image.save(buffer, "JPEG", quality=92, subsampling=0)
        (coco / name).write_bytes(buffer.getvalue())
        (pictures / f"{stem}.jpg").write_bytes(buffer.getvalue())
        _ade_mask(scene).save(masks / f"{stem}.png")
        size = {"height": settings.side, "width": settings.side}
        images.append({"id": image_id, "file_name": name, **size})
        annotations += [
            _coco_annotation(instance, image_id * _ANNOTATIONS_PER_IMAGE + place, image_id)
            for place, instance in enumerate(scene.instances)
        ]
        progress(done + index + 1)
    categories = [
        {"id": each.category, "name": each.name, "supercategory": each.supercategory}
        for each in CLASSES
    ]
    description = f"Rendered scenes of vision-ttt, {split}, seed {settings.seed}"
    content = {
        "info": {"description": description},
        "images": images,
        "annotations": annotations,
        "categories": categories,
    }
    file = told / f"instances_{_COCO[split]}.json"
    file.write_text(json.dumps(content), encoding="utf-8")


def _coco_annotation(instance: Instance, number: int, image: int) -> dict[str, Any]:
    """An annotation of a COCO file; the mask is in run lengths, for it may have holes."""
    mask = rle_masks.encode(np.asfortranarray(instance.mask, dtype=np.uint8))
    return {
        "id": number,
        "image_id": image,
        "category_id": CLASSES[instance.label].category,
        "segmentation": {"size": list(instance.mask.shape), "counts": mask["counts"].decode()},
        "area": int(instance.mask.sum()),
        "bbox": np.asarray(rle_masks.toBbox(mask)).tolist(),
        "iscrowd": int(instance.is_crowd),
    }


def _ade_mask(scene: Scene) -> Image.Image:
    """The class of each pixel: 0 of an object that is not annotated, else from 1."""
    values = np.ones(scene.unlabelled.shape, dtype=np.uint8)
    values[scene.unlabelled] = 0
    for instance in scene.instances:
        values[instance.mask] = 2 + instance.label
    return Image.fromarray(values)


def _render_objects(folder: Path, settings: SceneSettings, split: Split) -> None:
    """Write the pictures of single objects, a folder per class."""
    for each in CLASSES:
        (folder / each.name).mkdir(parents=True, exist_ok=True)
    for index in range(settings.count(split, "objects")):
        picture, label = render_object(settings.seed, split, index, settings.object_side)
        picture.save(folder / CLASSES[label].name / f"{index:08d}.png")
