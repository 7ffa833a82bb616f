"""Reading a COCO file of instances: what is wrong with it is named before anything is trained."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from vision_ttt.data.coco import CocoAnnotations, Counts, PackedBytes, corners
from vision_ttt.data.coco_checks import Checked, Fault, check_annotation, shown
from vision_ttt.data.shards import DatasetError
from vision_ttt.file_kinds import UnreadableFile, is_text, read_regular

_LISTS = ("images", "annotations", "categories")
_LARGEST_SIDE = 65_535  # pixels; beyond it a size is a typing error
_LARGEST_ID = 2**53 - 1  # COCO's evaluation converts ids to floats; larger ones are not exact
_LARGEST_FILE = 2**33  # bytes; some ten times those of the largest sets
_UNKNOWN = Checked((math.nan,) * 4, math.nan, False, False)


def read_coco(path: str | Path) -> CocoAnnotations:
    """Read a COCO file of instances (`images`, `annotations`, `categories`).

    What is wrong with one annotation, such as a polygon outside of its image, is kept as a fault of
    its image. All else stops the reading.

    Raises:
        FileNotFoundError: there is no such file.
        DatasetError: it is no file, too large, no JSON or no COCO; an id is there twice; an
            annotation is of an image or a category that the file does not declare.
    """
    path = Path(path)
    images, annotations, categories = _lists(path)
    names = _names_of_categories(path, categories)
    label_of = {category: label for label, category in enumerate(names, start=1)}
    sizes = _sizes(path, images)
    by_image = _by_image(path, images, annotations, label_of)
    ordered = [annotation for own in by_image for annotation in own]
    faults: dict[int, str] = {}
    checked: list[Checked] = []
    for index, own in enumerate(by_image):
        for annotation in own:
            try:
                checked.append(check_annotation(annotation, *sizes[index]))
            except Fault as fault:
                checked.append(_UNKNOWN)
                where = f"annotation {annotation['id']} of image {images[index]['file_name']}"
                faults.setdefault(index, f"{path}: {where}: {fault}")
    starts = np.cumsum([0, *map(len, by_image)], dtype=np.int64)
    boxes = np.array([each.box for each in checked], dtype=np.float64).reshape(-1, 4)
    crowd = np.array([each.crowd for each in checked], dtype=bool)
    size_array = np.array(sizes, dtype=np.int64).reshape(-1, 2)
    image_of = np.repeat(np.arange(len(images)), np.diff(starts))
    left, top, right, bottom = corners(boxes, size_array[image_of]).T
    has_area = (right > left) & (bottom > top)  # no NaN has
    trained = has_area & ~crowd & ~np.isin(image_of, list(faults))
    filled = {*image_of[trained].tolist(), *faults}
    return CocoAnnotations(
        path=path,
        classes=tuple(names.values()),
        category_ids=tuple(names),
        image_ids=np.array([image["id"] for image in images], dtype=np.int64),
        sizes=size_array,
        starts=starts,
        labels=np.array([label_of[each["category_id"]] for each in ordered], dtype=np.int64),
        boxes=boxes,
        areas=np.array([each.area for each in checked], dtype=np.float64),
        crowd=crowd,
        trained=trained,
        counts=Counts(
            images=len(images),
            empty_images=len(images) - len(filled),
            objects=int(trained.sum()),
            crowd_regions=int(crowd.sum()),
            zero_area_boxes=int((~np.isnan(left) & ~crowd & ~has_area).sum()),
            clipped_objects=sum(each.outside for each in checked),
            faulty_images=len(faults),
        ),
        faults=faults,
        _names=PackedBytes(image["file_name"].encode() for image in images),
        # The fastest form that gives the numbers back exactly, in 9 bytes each.
        _segmentations=PackedBytes(pickle.dumps(each.get("segmentation")) for each in ordered),
    )


def _lists(path: Path) -> list[list[dict[str, Any]]]:
    """The three lists of the file, whose entries are mappings with an `id`, each once."""
    try:
        content = json.loads(read_regular(path, _LARGEST_FILE))
    except UnreadableFile as error:
        raise DatasetError(str(error)) from error
    except (ValueError, RecursionError) as error:  # of JSON and of UTF-8, or nested too deep
        raise DatasetError(f"{path} is no JSON, or damaged: {error}") from error
    needed = f"a mapping with the lists {', '.join(_LISTS)} is needed"
    if not isinstance(content, dict):
        raise DatasetError(f"{path} holds a {type(content).__name__}; {needed}")
    for name in _LISTS:
        entries = content.get(name)
        if not isinstance(entries, list):
            reason = f"its {name} are {shown(entries)}" if name in content else f"it has no {name}"
            raise DatasetError(f"{path} is no COCO file of instances: {reason}; {needed}")
        seen: set[int] = set()
        for place, entry in enumerate(entries):
            what = f"entry {place} of {name}"
            _check(path, what, entry, isinstance(entry, dict), "a mapping")
            number = entry.get("id")
            _check_id(path, f"the id of {what}", number)
            if number in seen:
                raise DatasetError(f"{path}: the id {number} is there twice among its {name}")
            seen.add(number)
    return [content[name] for name in _LISTS]


def _names_of_categories(path: Path, categories: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Names by ascending id."""
    if not categories:
        raise DatasetError(f"{path} has no category; at least one is needed")
    names = {}
    for category in sorted(categories, key=lambda each: each["id"]):
        name = category.get("name")
        good = isinstance(name, str) and name != "" and is_text(name)
        what = f"the name of category {category['id']}"
        _check(path, what, name, good, "a non-empty string of Unicode characters")
        names[category["id"]] = name
    return names


def _sizes(path: Path, images: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Heights and widths of the images, whose names are checked, too."""
    for image in images:
        name = image.get("file_name")
        good = isinstance(name, str) and "\0" not in name and is_text(name)
        place = PurePath(name if good else "")
        good = bool(place.name) and not place.is_absolute() and ".." not in place.parts
        what = f"the file_name of image {image['id']}"
        _check(path, what, name, good, "a path below the folder of images")
        for side in ("height", "width"):
            value = image.get(side)
            good = type(value) is int and 1 <= value <= _LARGEST_SIDE
            accepted = f"a whole number from 1 to {_LARGEST_SIDE:,}"
            _check(path, f"the {side} of image {name}", value, good, accepted)
    return [(image["height"], image["width"]) for image in images]


def _by_image(
    path: Path,
    images: Sequence[Mapping[str, Any]],
    annotations: Sequence[Mapping[str, Any]],
    label_of: Mapping[int, int],
) -> list[list[Mapping[str, Any]]]:
    """The annotations of each image, in the file's order."""
    place_of = {image["id"]: place for place, image in enumerate(images)}
    by_image: list[list[Mapping[str, Any]]] = [[] for _ in images]
    for annotation in annotations:
        for key, declared, among in (
            ("image_id", place_of, "images"),
            ("category_id", label_of, "categories"),
        ):
            value = annotation.get(key)
            what = f"the {key} of annotation {annotation['id']}"
            _check_id(path, what, value)
            if value not in declared:
                raise DatasetError(
                    f"{path}: {what} is {value}, which is not among its {len(declared)} {among}"
                )
        by_image[place_of[annotation["image_id"]]].append(annotation)
    return by_image


def _check_id(path: Path, what: str, value: Any) -> None:
    good = type(value) is int and 0 <= value <= _LARGEST_ID
    _check(path, what, value, good, f"a whole number from 0 to {_LARGEST_ID}")


def _check(path: Path, what: str, value: Any, good: bool, accepted: str) -> None:
    if not good:
        raise DatasetError(f"{path}: {what} is {shown(value)}; it must be {accepted}")
