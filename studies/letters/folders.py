"""Pictures of letters on disk, to detect, segment and classify.

A folder holds the same pictures, which are those that are rendered on the fly, in three layouts:

    coco/train2017/000000000001.png …          coco/dev2017/ …    coco/val2017/ …
    coco/annotations/instances_train2017.json  …                  the letters that count
    ade/images/training/000000000001.png …     ade/images/development/ …   …/validation/ …
    ade/annotations/training/ …                the pixels' classes; the first one is the background
    ade/objectInfo150.txt                      their names, in the file that ADE20K has
    ringed/train/A/000000000001.png …          ringed/dev/ …      ringed/val/ …
                                               by the letter that has a ring
    manifest.json                              what was rendered; written last

What other tools evaluate with by default, `val2017`, `validation` and `val`, are the test pictures;
those of the split "validation" are in `dev2017`, `development` and `dev`.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from studies.letters.annotation_files import ade_classes, coco_file, polygons
from studies.letters.dataset import BACKGROUND_NAME
from studies.letters.fonts import SPLITS, Split
from studies.letters.images import (
    INKS,
    Letter,
    LetterPicture,
    LetterSettings,
    fill_outline,
    render_letters,
)
from studies.letters.rendered_folder import (
    Entries,
    encoded,
    is_complete,
    render_folder,
    write_file,
    write_json,
)

VERSION = 2
"""Of what is drawn; another one draws other pictures from the same seed."""

_KIND = "letters"
_COCO = {"train": "train2017", "validation": "dev2017", "test": "val2017"}
_ADE = {"train": "training", "validation": "development", "test": "validation"}
_RINGED = {"train": "train", "validation": "dev", "test": "val"}
_FIRST_ID = {"train": 1, "validation": 1_000_001, "test": 2_000_001}  # the splits share none


@dataclass(frozen=True)
class LetterSet:
    """What a folder of letters holds.

    Args:
        settings: of the pictures.
        train_images, validation_images, test_images: how many, 1 to 1,000,000.

    Raises:
        ValueError: a number is out of its range.
    """

    settings: LetterSettings = dataclasses.field(default_factory=LetterSettings)
    train_images: int = 1000
    validation_images: int = 100
    test_images: int = 100

    def __post_init__(self) -> None:
        for split, count in self.images.items():
            if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 1_000_000:
                raise ValueError(
                    f"{split}_images is {count!r}; it must be a whole number from 1 to 1,000,000"
                )

    @property
    def images(self) -> dict[Split, int]:
        """Split → number of pictures."""
        counts = (self.train_images, self.validation_images, self.test_images)
        return dict(zip(SPLITS, counts, strict=True))

    @property
    def asked(self) -> dict[str, Any]:
        """All that the files depend on, for the manifest."""
        counts = {f"{split}_images": count for split, count in self.images.items()}
        return {"version": VERSION, **dataclasses.asdict(self.settings), **counts}


def holds_letters(folder: Path, letters: LetterSet) -> bool:
    """Whether a folder holds the whole set; False for a part of it, or nothing.

    Raises:
        DatasetError: it holds something else.
    """
    return is_complete(folder, _KIND, letters.asked)


def render_letter_folder(
    folder: Path,
    letters: LetterSet,
    progress: Callable[[int], None] = lambda pictures: None,
) -> None:
    """Render a set into a folder, or go on with one that was interrupted, or find it complete.

    One process at a time; the folder is made where it is missing.

    Args:
        progress: called with the number of pictures that are there, at first and after each part.

    Raises:
        DatasetError: the folder holds a set of other settings, or something else.
        OSError: the folder cannot be written.
    """
    render_folder(
        folder,
        _KIND,
        letters.asked,
        letters.images,
        lambda split, indices: _render_part(folder, letters.settings, split, indices),
        lambda entries: _finish(folder, letters.settings, entries),
        progress,
    )


def _render_part(folder: Path, settings: LetterSettings, split: Split, indices: range) -> Entries:
    """Write the files of some pictures; return what the COCO file says of them."""
    coco = folder / "coco" / _COCO[split]
    images, masks = (folder / "ade" / kind / _ADE[split] for kind in ("images", "annotations"))
    by_class = [folder / "ringed" / _RINGED[split] / name for name in settings.names]
    for each in (coco, images, masks, *by_class):
        each.mkdir(parents=True, exist_ok=True)
    entries: Entries = {"images": [], "annotations": []}
    for index in indices:
        picture = render_letters(settings, split, index)
        number = _FIRST_ID[split] + index
        name = f"{number:012d}.png"
        # Without loss: the pictures stay those that are rendered on the fly.
        content = encoded(picture.image, "PNG")
        for place in (coco, images, by_class[picture.ringed]):
            (place / name).write_bytes(content)
        mask = Image.fromarray(picture.labels() + 1)  # in ADE20K's masks 0 is no class
        (masks / name).write_bytes(encoded(mask, "PNG"))
        entries["images"].append(_image_entry(picture, number, name, settings))
        first = number * (settings.side // settings.cell) ** 2  # a cell has one letter at most
        counting = [letter for letter in picture.letters if letter.counts]
        entries["annotations"] += [
            _annotation(letter, first + place, number) for place, letter in enumerate(counting)
        ]
    return entries


def _image_entry(
    picture: LetterPicture, number: int, name: str, settings: LetterSettings
) -> dict[str, Any]:
    """An image of a COCO file; beyond COCO: its mark, and the letter that has the ring."""
    extent = settings.mark_side
    left, top = (int(middle - extent / 2) for middle in picture.mark)
    return {
        "id": number,
        "file_name": name,
        "height": settings.side,
        "width": settings.side,
        "license": 1,
        "mark": {"ink": tuple(INKS)[picture.ink], "bbox": [left, top, extent, extent]},
        "ringed": settings.names[picture.ringed],
    }


def _annotation(letter: Letter, number: int, image: int) -> dict[str, Any]:
    """An annotation of a COCO file; beyond COCO: the pixels from the letter's middle to the mark's.

    COCO's rasterisation turns the polygon into the pixels of the letter's hull.
    """
    corner = letter.outline.min(axis=0)
    width, height = letter.outline.max(axis=0) - corner + 1
    canvas = Image.new("L", (int(width), int(height)))
    fill_outline(canvas, letter._replace(outline=letter.outline - corner), 255)
    mask = np.asarray(canvas) > 0
    left, top = corner.tolist()
    # In pixels of the picture; a hull has no hole.
    outlines = [np.reshape(each, (-1, 2)) + corner for each in polygons(mask)]
    return {
        "id": number,
        "image_id": image,
        "category_id": letter.label + 1,
        "segmentation": [each.ravel().tolist() for each in outlines],
        "area": int(mask.sum()),
        "bbox": [left, top, int(width), int(height)],
        "iscrowd": 0,
        "distance": round(letter.distance, 1),
    }


def _finish(folder: Path, settings: LetterSettings, entries: Mapping[str, Entries]) -> None:
    """Write the COCO files and the list of ADE's classes."""
    categories = [
        {"id": number, "name": name, "supercategory": "letter"}
        for number, name in enumerate(settings.names, start=1)
    ]
    (folder / "coco" / "annotations").mkdir(exist_ok=True)
    for split in SPLITS:
        ringed = {entry["ringed"] for entry in entries[split]["images"]}
        if missing := [name for name in settings.names if name not in ringed]:
            warnings.warn(
                f"no {split} picture has a ring around {', '.join(missing)}: {folder / 'ringed'} is"
                " refused as a folder of images by class; render more pictures for that",
                RuntimeWarning,
                stacklevel=2,
            )
        description = f"Letters of vision-ttt, {split}, seed {settings.seed}"
        content = coco_file(entries[split], categories, description)
        write_json(folder / "coco" / "annotations" / f"instances_{_COCO[split]}.json", content)
    write_file(
        folder / "ade" / "objectInfo150.txt", ade_classes((BACKGROUND_NAME, *settings.names))
    )
