"""COCO's files of instances: what is read, what is left out, and every fault by name."""

import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faster_coco_eval.core.mask as rle_masks
import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO

from coco_files import CATEGORIES, annotation, octagon, rectangle, write_file, write_part
from vision_ttt.data import DatasetError, ImageError
from vision_ttt.data.coco import AnnotationError, CocoImages, PackedBytes, corners
from vision_ttt.data.coco_reading import read_coco

HEIGHT, WIDTH = 40, 60
IMAGE = {"id": 5, "file_name": "a.png", "height": HEIGHT, "width": WIDTH}
OTHER = {"id": 2, "file_name": "sub/b.png", "height": HEIGHT, "width": WIDTH}
GOOD = annotation(1, 5, 7, rectangle(10, 10, 20, 15))


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write images of the sizes that the file says, and the file of these annotations."""

    def written(*annotations: dict[str, Any], images: tuple[Any, ...] = (IMAGE, OTHER)) -> Path:
        for image in (IMAGE, OTHER):
            path = tmp_path / "train2017" / image["file_name"]
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (WIDTH, HEIGHT)).save(path)
        return write_file(tmp_path, "train", list(images), list(annotations))

    return written


def _images(path: Path, empty: str = "keep") -> CocoImages:
    told = read_coco(path)
    return CocoImages(told, path.parent.parent / "train2017", told.places(empty))


def test_objects_are_those_of_pycocotools(tmp_path: Path) -> None:
    path = write_part(tmp_path, "train", 12, seed=3, size=(64, 48))
    images, theirs = _images(path), COCO(str(path))
    assert images.annotations.classes == ("square", "disc")
    assert images.annotations.category_ids == (3, 7)
    assert images.annotations.ids_in_names()
    found = 0
    for index, item in enumerate(images):
        image_id = int(images.annotations.image_ids[index])
        every = theirs.loadAnns(theirs.getAnnIds([image_id]))
        single = [each for each in every if not each["iscrowd"]]
        assert item.image.size == (64, 48)
        assert item.labels.tolist() == [{3: 1, 7: 2}[each["category_id"]] for each in single]
        for box, mask, each in zip(item.boxes, item.masks, single, strict=True):
            x, y, width, height = each["bbox"]
            np.testing.assert_allclose(box, [x, y, x + width, y + height])
            np.testing.assert_array_equal(rle_masks.decode(mask), theirs.annToMask(each))
        truth = images.annotations.truth(index)
        assert [each["iscrowd"] for each in truth] == [each["iscrowd"] for each in every]
        for own, each in zip(truth, every, strict=True):
            assert own["bbox"] == each["bbox"]
            assert own["category_id"] == each["category_id"]
            np.testing.assert_array_equal(
                rle_masks.decode(own["segmentation"]), theirs.annToMask(each)
            )
        found += len(single)
    counts = images.annotations.counts
    assert (counts.images, counts.objects, counts.crowd_regions) == (12, found, 1)
    assert counts.empty_images == 2
    skipping = _images(path, "skip")
    assert [int(place) for place in skipping.places] == [0, 1, 2, 3, 5, 6, 7, 8, 10, 11]


def test_what_is_not_trained_on_is_counted(write: Callable[..., Path]) -> None:
    path = write(
        GOOD,
        annotation(2, 5, 3, rectangle(0, 0, 5, 5), iscrowd=1),
        annotation(3, 5, 3, rectangle(1, 1, 5, 5), bbox=[1, 1, 0, 5], segmentation=[]),
        annotation(4, 5, 3, rectangle(-4, 30, 10, 20)),
        annotation(5, 2, 3, rectangle(WIDTH, 3, 4, 4), segmentation=[rectangle(50, 3, 14, 4)]),
    )
    images = _images(path)
    counts = images.annotations.counts
    assert (counts.crowd_regions, counts.zero_area_boxes, counts.clipped_objects) == (1, 2, 2)
    assert (counts.objects, counts.empty_images, counts.faulty_images) == (2, 1, 0)
    item = images[0]
    assert item.boxes.tolist() == [[10, 10, 30, 25], [0, 30, 6, HEIGHT]]
    assert rle_masks.decode(item.masks[1])[30:, :6].all()
    assert rle_masks.decode(item.masks[1]).sum() == 60
    # For evaluation all are there: a crowd region excuses, a box without area is missed.
    assert [each["iscrowd"] for each in images.annotations.truth(0)] == [0, 1, 0, 0]
    assert [int(place) for place in _images(path, "skip").places] == [0]
    assert len(images[1].boxes) == 0


@pytest.mark.parametrize("line", [(WIDTH, 5, 0, 9), (0, 5, 0, 9), (5, HEIGHT, 9, 0), (5, 0, 9, 0)])
def test_a_line_on_an_edge_has_no_area(
    write: Callable[..., Path], line: tuple[int, int, int, int]
) -> None:
    """Tools leave it of an object that they cut off at the edge."""
    counts = _images(write(GOOD, annotation(2, 5, 3, rectangle(*line)))).annotations.counts
    assert (counts.objects, counts.zero_area_boxes, counts.faulty_images) == (1, 1, 0)


def test_every_form_of_segmentation(write: Callable[..., Path]) -> None:
    mask = np.zeros((HEIGHT, WIDTH), dtype=np.uint8, order="F")
    mask[3:9, 4:20] = 1
    packed = rle_masks.encode(mask)
    text = {"size": packed["size"], "counts": packed["counts"].decode()}
    counts = np.diff(np.flatnonzero(np.diff(mask.ravel("F"), prepend=0, append=0)), prepend=0)
    plain = [*counts.tolist(), mask.size - int(counts.sum())]
    box = {"bbox": [4, 3, 16, 6], "area": 96.0}
    parts = [rectangle(4, 3, 8, 6), rectangle(12, 3, 8, 6)]
    polygon = rectangle(4, 3, 16, 6)
    images = _images(
        write(
            annotation(1, 5, 3, polygon, segmentation=parts),
            annotation(2, 5, 3, polygon, segmentation=text, **box),
            annotation(3, 5, 3, polygon, segmentation={"size": [40, 60], "counts": plain}, **box),
        )
    )
    for held in images[0].masks:
        np.testing.assert_array_equal(rle_masks.decode(held), mask)


def test_area_is_that_of_the_mask_where_the_file_says_none(write: Callable[..., Path]) -> None:
    without = {name: value for name, value in GOOD.items() if name != "area"}
    (own,) = _images(write(without)).annotations.truth(0)
    assert own["area"] == 300.0


_DAMAGED = [
    ({"bbox": [1, 2, 3]}, r"bbox is \[1, 2, 3\]; it must be \[x, y, width, height\]"),
    ({"bbox": None}, "bbox is None"),
    ({"bbox": [1, 2, 3, -4]}, r"bbox is \[1, 2, 3, -4\].*at least 0"),
    ({"bbox": [1, 2, "3", 4]}, r"bbox is \[1, 2, '3', 4\]"),
    ({"bbox": [math.nan, 2, 3, 4]}, r"bbox is \[nan, 2, 3, 4\].*finite"),
    ({"bbox": [math.inf, 2, 3, 4]}, r"bbox is \[inf, 2, 3, 4\].*finite"),
    ({"bbox": [61, 2, 3, 4]}, r"bbox \[61, 2, 3, 4\] lies outside of the image; .* 60 × 40"),
    ({"iscrowd": 2}, "iscrowd is 2; it must be 0 or 1"),
    ({"area": -1}, "area is -1; it must be a finite number of at least 0"),
    ({"area": math.nan}, "area is nan"),
    ({"area": 2e10}, r"area is 20000000000.0; it must be at most 1e\+10"),
    ({"segmentation": []}, r"segmentation is \[\]; it must be polygons"),
    ({"segmentation": None}, "segmentation is None; it must be polygons"),
    ({"segmentation": "a"}, "segmentation is 'a'"),
    ({"segmentation": [[1, 2, 3, 4]]}, r"a polygon is \[1, 2, 3, 4\]; .* 3 points or more"),
    ({"segmentation": [[1, 2, 3, 4, 5, 6, 7]]}, r"a polygon is .* 3 points or more"),
    ({"segmentation": [[1, 2, 3, 4, math.nan, 6]]}, "a polygon is .* finite numbers"),
    ({"segmentation": [[1, 2, 3, 4, 5, True]]}, "a polygon is .*True"),
    ({"segmentation": [rectangle(70, 1, 5, 5)]}, r"the polygon \[70, 1, 75.* lies outside"),
    ({"segmentation": [[0, 0, 1e7, 0, 0, 9]]}, "coordinate 10000000.0; .* ±100,000 pixels"),
    # A few bytes that would take gigabytes while a mask is made of them.
    (
        {"segmentation": [[-9e4, -9e4, 9e4, 9e4] * 100]},
        "outline is 36,000,000 .* at most 1,000,000",
    ),
    ({"segmentation": [[0, 0, 59, 39] * 20_000]}, "outline is 2,360,000 pixels long"),
    ({"segmentation": [[-9e4, 0, 9e4, 0, 0, 9]] * 9}, "outline is 3,240,000 pixels long"),
    ({"segmentation": {"size": [60, 40], "counts": [2400]}}, r"size is \[60, 40\]; .*\[40, 60\]"),
    ({"segmentation": {"size": [40, 60], "counts": [2399]}}, r"counts are \[2399\].* 2400 pixels"),
    ({"segmentation": {"size": [40, 60], "counts": [2402, -2]}}, "counts are .*at least 0"),
    ({"segmentation": {"size": [40, 60], "counts": "oooooooooooooooo"}}, "counts are damaged"),
    ({"segmentation": {"size": [40, 60], "counts": "0"}}, r"counts are \[0\]"),
    ({"segmentation": {"size": [40, 60], "counts": "é\0"}}, "counts are "),
    ({"segmentation": {"size": [40, 60]}}, "counts are None"),
]


@pytest.mark.parametrize(("changes", "told"), _DAMAGED)
def test_a_fault_of_an_annotation_is_its_images(
    write: Callable[..., Path], changes: dict[str, Any], told: str
) -> None:
    path = write({**GOOD, **changes}, annotation(9, 2, 3, octagon(20, 20, 8)))
    images = _images(path, "skip")
    assert images.annotations.counts.faulty_images == 1
    assert images.annotations.counts.empty_images == 0
    with pytest.raises(AnnotationError, match=told) as raised:
        images[0]
    assert str(raised.value).startswith(f"{path}: annotation 1 of image a.png: ")
    assert raised.value.name == str(images.folder / "a.png")
    again = pickle.loads(pickle.dumps(raised.value))  # as worker processes send it
    assert (str(again), again.name) == (str(raised.value), raised.value.name)
    assert len(images[1].boxes) == 1


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b'{"images": [', "is no JSON, or damaged"),
        (b"\xff\xfe\xff", "is no JSON, or damaged"),
        (b"[" * 100_000, "is no JSON, or damaged"),
        (b"[]", r"holds a list; a mapping with the lists images, annotations, categories"),
        (b'{"images": [], "annotations": []}', "it has no categories"),
        (b'{"images": {}, "annotations": [], "categories": []}', r"its images are \{\}"),
        (b'{"images": [3], "annotations": [], "categories": []}', "entry 0 of images is 3"),
        (b'{"images": [], "annotations": [], "categories": []}', "has no category"),
    ],
)
def test_what_is_no_coco_file_is_refused(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "instances.json"
    path.write_bytes(content)
    with pytest.raises(DatasetError, match=told) as raised:
        read_coco(path)
    assert str(path) in str(raised.value)
    with pytest.raises(FileNotFoundError):
        read_coco(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("images", "annotations", "told"),
    [
        ([IMAGE, IMAGE], [], "the id 5 is there twice among its images"),
        ([{**IMAGE, "id": "5"}], [], "the id of entry 0 of images is '5'"),
        ([{**IMAGE, "file_name": "../a.png"}], [], "file_name of image 5 is '../a.png'"),
        ([{**IMAGE, "file_name": "/a.png"}], [], "file_name of image 5 is '/a.png'"),
        ([{**IMAGE, "file_name": ""}], [], "file_name of image 5 is ''"),
        ([{**IMAGE, "height": 0}], [], "the height of image a.png is 0; .* from 1 to 65,535"),
        ([{**IMAGE, "width": 1.5}], [], "the width of image a.png is 1.5"),
        ([{**IMAGE, "height": 10**9}], [], "the height of image a.png is 1000000000"),
        (
            [{**IMAGE, "file_name": "\ud800.png"}],
            [],
            r"image 5 is '\\ud800\.png'; it must be a path",
        ),
        ([IMAGE], [GOOD, GOOD], "the id 1 is there twice among its annotations"),
        ([IMAGE], [{**GOOD, "image_id": 9}], "the image_id of annotation 1 is 9, .* 1 images"),
        (
            [IMAGE],
            [{**GOOD, "category_id": 4}],
            "category_id of annotation 1 is 4, .* 2 categories",
        ),
        ([IMAGE], [{**GOOD, "category_id": None}], "category_id of annotation 1 is None"),
        ([IMAGE], [{**GOOD, "id": True}], "the id of entry 0 of annotations is True"),
        ([IMAGE], [{**GOOD, "id": 2**64}], "whole number from 0 to 9007199254740991"),
        ([{**IMAGE, "id": 2**53}], [], "the id of entry 0 of images is 9007199254740992"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    tmp_path: Path, images: list[Any], annotations: list[Any], told: str
) -> None:
    path = write_file(tmp_path, "train", images, annotations)
    with pytest.raises(DatasetError, match=told):
        read_coco(path)


@pytest.mark.parametrize(
    ("category", "told"),
    [
        ({"id": 1, "name": ""}, "the name of category 1 is ''"),
        ({"id": 1, "name": 5}, "the name of category 1 is 5; it must be a non-empty string"),
        ({"id": 1, "name": "\ud800"}, r"the name of category 1 is '\\ud800'.* Unicode characters"),
        ({"id": "1", "name": "a"}, "the id of entry 2 of categories is '1'"),
    ],
)
def test_categories_must_have_names(tmp_path: Path, category: dict[str, Any], told: str) -> None:
    path = tmp_path / "instances.json"
    content = {"images": [], "annotations": [], "categories": [*CATEGORIES, category]}
    path.write_text(json.dumps(content))
    with pytest.raises(DatasetError, match=told):
        read_coco(path)


def test_objects_of_faulty_and_missing_images_do_not_count(write: Callable[..., Path]) -> None:
    lost = {**IMAGE, "id": 6, "file_name": "lost.png"}
    path = write(
        {**GOOD, "area": -1.0},
        annotation(2, 5, 3, rectangle(1, 1, 5, 5)),
        annotation(3, 6, 3, rectangle(1, 1, 5, 5)),
        annotation(4, 2, 3, rectangle(1, 1, 5, 5), iscrowd=1),
        images=(IMAGE, OTHER, lost),
    )
    told = _images(path).annotations
    assert (told.counts.objects, told.counts.zero_area_boxes) == (1, 0)
    assert told.objects_beside([]) == 1
    assert told.objects_beside(["lost.png"]) == 0


def test_a_polygon_is_cut_off_as_pycocotools_does(write: Callable[..., Path]) -> None:
    polygon = [-900.5, 5.25, 30.0, 20.5, 95_000.0, 3000.0, 12.0, 39.0]
    path = write({**GOOD, "segmentation": [polygon]})
    (mask,) = _images(path)[0].masks
    theirs = COCO(str(path))
    held = rle_masks.decode(mask)
    assert 0 < held.sum() < held.size
    np.testing.assert_array_equal(held, theirs.annToMask(theirs.loadAnns([1])[0]))


def test_images_that_are_missing_or_of_another_size_are_named(write: Callable[..., Path]) -> None:
    lost = {**IMAGE, "id": 6, "file_name": "lost.png"}
    below = {**IMAGE, "id": 7, "file_name": "no/such.png"}
    wide = {**OTHER, "width": HEIGHT, "height": WIDTH}
    images = _images(write(GOOD, images=(IMAGE, wide, lost, below)))
    assert images.annotations.missing(images.folder) == ["lost.png", "no/such.png"]
    assert not images.annotations.ids_in_names()
    assert images[0].image.size == (WIDTH, HEIGHT)
    with pytest.raises(AnnotationError, match=r"b\.png has 60 × 40 pixels .* says 40 × 60"):
        images[1]
    with pytest.raises(ImageError, match=r"lost\.png: there is no such file, but .* names it"):
        images[2]
    (images.folder / "a.png").write_bytes(b"\x89PNG")
    with pytest.raises(ImageError, match=r"cannot decode image .*a\.png"):
        images[0]
    with pytest.raises(FileNotFoundError):
        images.annotations.missing(images.folder / "none")


def test_corners_are_cut_off_at_the_images_edges() -> None:
    boxes = np.array([[-2.0, 3.0, 10.0, 50.0], [55.0, 1.0, 3.0, 4.0]])
    found = corners(boxes, np.array([HEIGHT, WIDTH]))
    assert found.tolist() == [[0, 3, 8, 40], [55, 1, 58, 5]]


def test_packed_bytes_are_the_parts() -> None:
    parts = [b"", b"abc", b"\0", b""]
    packed = PackedBytes(parts)
    assert [packed[index] for index in range(len(packed))] == parts
    for index in (-1, 4):
        with pytest.raises(IndexError):
            packed[index]
