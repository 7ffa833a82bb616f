"""Images with annotated objects, as COCO's files of instances hold them, kept small."""

from __future__ import annotations

import os
import pickle
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Literal

import faster_coco_eval.core.mask as rle_masks
import numpy as np
from PIL import Image
from torch.utils.data import Dataset

from vision_ttt.data.coco_checks import Rle, encoded
from vision_ttt.data.images import ImageError, open_labelled
from vision_ttt.errors import DamagedItem


class AnnotationError(DamagedItem):
    """An image whose annotations are wrong, or are of another image. `name` is its file."""


@dataclass(frozen=True, eq=False)
class AnnotatedImage:
    """An image with the objects that a detector is to find in it."""

    image: Image.Image
    """Of height H and width W, RGB."""
    boxes: np.ndarray
    """Corners x, y, x, y [N, 4] float64 in pixels, within the image."""
    labels: np.ndarray
    """Classes [N] int64, from 1."""
    masks: list[Rle]
    """N masks, each of size [H, W]."""


@dataclass(frozen=True)
class Counts:
    """What a file of annotations holds, and what is left out in training."""

    images: int = 0
    """Images."""
    empty_images: int = 0
    """Images among them without an object to train on."""
    objects: int = 0
    """Objects to train on; those of faulty images do not count."""
    crowd_regions: int = 0
    """Regions of many objects. They are not trained on, and a detection in one is not an error."""
    zero_area_boxes: int = 0
    """Objects whose box has no area, which are not trained on."""
    clipped_objects: int = 0
    """Objects and crowd regions of which a part lay outside of the image and was cut off."""
    faulty_images: int = 0
    """Images with an annotation that is wrong; each raises an AnnotationError when it is read."""


class PackedBytes:
    """A sequence of byte strings, kept as one.

    A Python object's reference count lies beside its content: a forked process that only reads a
    list of a million objects ends up with a copy of each page that they lie on. This is one object.
    """

    def __init__(self, parts: Iterable[bytes]) -> None:
        content = bytearray()
        ends = [0]
        for part in parts:
            content += part
            ends.append(len(content))
        self._content = bytes(content)
        self._ends = np.array(ends, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> bytes:
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} parts")
        return self._content[self._ends[index] : self._ends[index + 1]]


@dataclass(frozen=True, eq=False)
class CocoAnnotations:
    """A COCO file of instances: N images, A annotations ordered by image, C categories.

    Labels are places in the categories' order plus 1, as 0 is the background. All that is large
    lies in a few blocks of memory, which forked worker processes share.
    """

    path: Path
    """The JSON file."""
    classes: tuple[str, ...]
    """Names of the categories, by ascending id."""
    category_ids: tuple[int, ...]
    """Their ids, ascending."""
    image_ids: np.ndarray
    """[N] int64."""
    sizes: np.ndarray
    """Heights and widths [N, 2] int64 in pixels."""
    starts: np.ndarray
    """[N + 1] int64: image i has the annotations from starts[i] to before starts[i + 1]."""
    labels: np.ndarray
    """[A] int64."""
    boxes: np.ndarray
    """x, y, width, height [A, 4] float64, as in the file."""
    areas: np.ndarray
    """[A] float64 in square pixels; NaN where the file does not say."""
    crowd: np.ndarray
    """[A] bool: whether it is a region of many objects."""
    trained: np.ndarray
    """[A] bool: whether it is an object to train on."""
    counts: Counts
    faults: Mapping[int, str]
    """Image's place → the first fault of its annotations, as a message."""
    _names: PackedBytes = field(repr=False)
    _segmentations: PackedBytes = field(repr=False)

    def __len__(self) -> int:
        return len(self.image_ids)

    def name(self, index: int) -> str:
        """Return an image's file name, below the folder of images."""
        return self._names[index].decode()

    def annotations_of(self, index: int) -> range:
        """Return the places of an image's annotations."""
        return range(self.starts[index], self.starts[index + 1])

    def mask(self, index: int, place: int) -> Rle:
        """Return the mask of the annotation at `place`, which is of image `index`."""
        height, width = self.sizes[index].tolist()
        return encoded(pickle.loads(self._segmentations[place]), height, width)

    def places(self, empty_images: Literal["keep", "skip"] = "keep") -> np.ndarray:
        """Return the places of the images, without those that have no object to train on, or with.

        Images with faults are among them in any case.
        """
        if empty_images == "keep":
            return np.arange(len(self))
        filled = self._objects() > 0
        filled[list(self.faults)] = True
        return filled.nonzero()[0]

    def ids_in_names(self) -> bool:
        """Whether every file is named by its image's id, as COCO's are (000000000139.jpg)."""
        stems = (PurePath(self.name(index)).stem for index in range(len(self)))
        return all(
            stem.isdecimal() and int(stem) == image_id
            for stem, image_id in zip(stems, self.image_ids.tolist(), strict=True)
        )

    def missing(self, folder: Path) -> list[str]:
        """Return the names of the images that are not in `folder`.

        Raises:
            FileNotFoundError: there is no such folder.
        """
        held: dict[PurePath, Collection[str]] = {PurePath(): set(os.listdir(folder))}
        missing = []
        for index in range(len(self)):
            path = PurePath(self.name(index))
            if path.parent not in held:
                below = folder / path.parent
                held[path.parent] = set(os.listdir(below)) if below.is_dir() else ()
            if path.name not in held[path.parent]:
                missing.append(self.name(index))
        return missing

    def objects_beside(self, missing: Collection[str]) -> int:
        """Return the number of objects to train on in the images but those of these names."""
        lost = set(missing)
        held = [self.name(index) not in lost for index in range(len(self))]
        return int(self._objects()[held].sum())

    def truth(self, index: int) -> list[dict[str, Any]]:
        """Return an image's annotations for evaluation, crowd regions and boxes without area, too.

        They have COCO's fields, with the category's own id; the segmentation is an RLE.
        """
        found = []
        for place in self.annotations_of(index):
            mask = self.mask(index, place)
            area = float(self.areas[place])
            found.append(
                {
                    "image_id": int(self.image_ids[index]),
                    "category_id": self.category_ids[self.labels[place] - 1],
                    "bbox": self.boxes[place].tolist(),
                    "area": float(rle_masks.area(mask)) if np.isnan(area) else area,
                    "iscrowd": int(self.crowd[place]),
                    "segmentation": mask,
                }
            )
        return found

    def _objects(self) -> np.ndarray:
        """Numbers of objects to train on, by image."""
        image_of = np.repeat(np.arange(len(self)), np.diff(self.starts))
        return np.bincount(image_of[self.trained], minlength=len(self))


class CocoImages(Dataset[AnnotatedImage]):
    """The images of a COCO file, each with its objects; crowd regions are left out."""

    def __init__(self, annotations: CocoAnnotations, folder: Path, places: np.ndarray) -> None:
        self.annotations = annotations
        self.folder = folder
        self.places = places
        """Of the images among the annotations."""

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> AnnotatedImage:
        """Return an image with its objects.

        Raises:
            ImageError: the file is missing or does not decode.
            AnnotationError: its annotations are wrong, or it has another size than they say.
        """
        place, annotations = int(self.places[index]), self.annotations
        path = self.folder / annotations.name(place)
        if place in annotations.faults:
            raise AnnotationError(annotations.faults[place], str(path))
        height, width = annotations.sizes[place].tolist()
        try:
            image = open_labelled(path, (width, height))
        except FileNotFoundError as error:
            raise ImageError(
                str(path), f"there is no such file, but {annotations.path} names it"
            ) from error
        if image.size != (width, height):
            raise AnnotationError(
                f"{path} has {image.width} × {image.height} pixels (width × height), but"
                f" {annotations.path} says {width} × {height}; its boxes and masks are of another"
                " image",
                str(path),
            )
        objects = [each for each in annotations.annotations_of(place) if annotations.trained[each]]
        return AnnotatedImage(
            image,
            corners(annotations.boxes[objects], annotations.sizes[place]),
            annotations.labels[objects],
            [annotations.mask(place, each) for each in objects],
        )


def corners(boxes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return boxes as corners x, y, x, y [N, 4], cut off at the images' edges.

    Args:
        boxes: x, y, width, height [N, 4].
        sizes: heights and widths of their images, [2] or [N, 2].
    """
    ends = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
    high, wide = sizes[..., 0], sizes[..., 1]
    return np.clip(ends, 0.0, np.stack([wide, high, wide, high], axis=-1).astype(np.float64))
