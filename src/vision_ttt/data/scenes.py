"""The embedded set of scenes: objects for detection and segmentation, rendered on disk.

A folder holds the same pictures in two layouts:

    coco/train2017/000000000001.jpg …          coco/val2017/ …
    coco/annotations/instances_train2017.json  …/instances_val2017.json
    ade/images/training/scene_train_00000001.jpg …       ade/images/validation/ …
    ade/annotations/training/scene_train_00000001.png …  ade/annotations/validation/ …
    ade/objectInfo150.txt                      the masks' classes, in the file that ADE20K has
    objects/train/disc/00000000.png …   objects/val/…    single objects by class, to classify
    manifest.json                              what was rendered; written last

Colours, textures, places, sizes (over a factor of 8), occlusion and digits' scans are random; image
i of a split depends on (seed, split, i) and the size alone, on one machine bit for bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vision_ttt.data.annotation_files import ade_classes, coco_file
from vision_ttt.data.rendered_folder import (
    Entries,
    encoded,
    render_folder,
    write_file,
    write_json,
)
from vision_ttt.data.scene_annotations import ADE_CLASSES, CATEGORIES, ade_mask, coco_annotation
from vision_ttt.data.scene_images import SPLITS, Split, render_object, render_scene
from vision_ttt.data.scene_shapes import CLASSES

VERSION = 3
"""Of what is drawn; another one draws other pictures from the same seed."""

_COCO = {"train": "train2017", "test": "val2017"}
_ADE = {"train": "training", "test": "validation"}
_ADE_NAMES = {"train": "scene_train", "test": "scene_val"}
_OBJECTS = {"train": "train", "test": "val"}
_FIRST_ID = {"train": 1, "test": 1_000_001}  # of images; the splits share none
_ANNOTATIONS_PER_IMAGE = 100  # at most; their ids follow from the image's


@dataclass(frozen=True)
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
    train_images: int = 4000
    test_images: int = 300
    seed: int = 0
    object_side: int = 48
    train_objects: int = 8000
    test_objects: int = 500

    def __post_init__(self) -> None:
        least = {"side": 64, "train_images": 1, "test_images": 1, "seed": 0}
        least |= {"object_side": 32, "train_objects": 1, "test_objects": 1}
        for name, lowest in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                raise ValueError(f"{name} is {value!r}; it must be a whole number ≥ {lowest}")

    def count(self, split: Split) -> int:
        """The number of scenes of a split."""
        return {"train": self.train_images, "test": self.test_images}[split]

    def count_objects(self, split: Split) -> int:
        """The number of pictures of single objects of a split."""
        return {"train": self.train_objects, "test": self.test_objects}[split]


def coco_folder(folder: Path) -> Path:
    """The root of the COCO layout in a folder of scenes."""
    return folder / "coco"


def ade_folder(folder: Path) -> Path:
    """The root of the ADE20K layout in a folder of scenes."""
    return folder / "ade"


def objects_folder(folder: Path) -> Path:
    """The root of the pictures of single objects in a folder of scenes."""
    return folder / "objects"


def render_scenes(
    folder: Path,
    settings: SceneSettings,
    progress: Callable[[int], None] = lambda scenes: None,
) -> None:
    """Render a set into a folder, or go on with one that was interrupted, or find it complete.

    One process at a time; the folder is made where it is missing.

    Args:
        progress: called with the number of scenes that are there, at first and after each part.

    Raises:
        DatasetError: the folder holds a set of other settings, or something else.
        OSError: the folder cannot be written.
    """
    render_folder(
        folder,
        "scenes",
        {"version": VERSION, **dataclasses.asdict(settings)},
        {split: settings.count(split) for split in SPLITS},
        lambda split, scenes: _render_part(folder, settings, split, scenes),
        lambda entries: _finish(folder, settings, entries),
        progress,
    )


def _render_part(folder: Path, settings: SceneSettings, split: Split, scenes: range) -> Entries:
    """Write the files of some scenes; return what the COCO file says of them."""
    coco = coco_folder(folder) / _COCO[split]
    pictures, masks = (
        ade_folder(folder) / kind / _ADE[split] for kind in ("images", "annotations")
    )
    for each in (coco, pictures, masks):
        each.mkdir(parents=True, exist_ok=True)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for index in scenes:
        scene = render_scene(settings.seed, split, index, settings.side)
        image_id = _FIRST_ID[split] + index
        name = f"{image_id:012d}.jpg"
        stem = f"{_ADE_NAMES[split]}_{index + 1:08d}"
        picture = encoded(scene.image, "JPEG", quality=92, subsampling=0)
        (coco / name).write_bytes(picture)
        (pictures / f"{stem}.jpg").write_bytes(picture)
        (masks / f"{stem}.png").write_bytes(encoded(ade_mask(scene), "PNG"))
        size = {"height": settings.side, "width": settings.side}
        images.append({"id": image_id, "file_name": name, **size, "license": 1})
        for place, instance in enumerate(scene.instances):
            number = image_id * _ANNOTATIONS_PER_IMAGE + place
            annotations.append(coco_annotation(instance, number, image_id))
    return {"images": images, "annotations": annotations}


def _render_objects(folder: Path, settings: SceneSettings) -> None:
    """Write the pictures of single objects, a folder per class."""
    for split in SPLITS:
        root = objects_folder(folder) / _OBJECTS[split]
        for each in CLASSES:
            (root / each.name).mkdir(parents=True, exist_ok=True)
        for index in range(settings.count_objects(split)):
            picture, label = render_object(settings.seed, split, index, settings.object_side)
            path = root / CLASSES[label].name / f"{index:08d}.png"
            path.write_bytes(encoded(picture, "PNG"))


def _finish(folder: Path, settings: SceneSettings, entries: Mapping[str, Entries]) -> None:
    """Write the COCO files, the list of ADE's classes, and the single objects."""
    (coco_folder(folder) / "annotations").mkdir(exist_ok=True)
    for split in SPLITS:
        description = f"Rendered scenes of vision-ttt, {split}, seed {settings.seed}"
        content = coco_file(entries[split], CATEGORIES, description)
        write_json(coco_folder(folder) / "annotations" / f"instances_{_COCO[split]}.json", content)
    write_file(ade_folder(folder) / "objectInfo150.txt", ade_classes(ADE_CLASSES))
    _render_objects(folder, settings)
