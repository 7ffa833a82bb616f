"""Letters on disk: the pictures that are rendered on the fly, as our readers accept them."""

import dataclasses
import json
from pathlib import Path

import faster_coco_eval.core.mask as rle_masks
import numpy as np
import pytest
from PIL import Image

from studies.letters.annotation_files import polygons
from studies.letters.dataset import LetterImages
from studies.letters.folders import LetterSet, holds_letters, render_letter_folder
from studies.letters.images import INKS, LetterSettings, render_letters
from vision_ttt.data import DatasetError, DatasetSpec, open_dataset
from vision_ttt.data.coco import CocoImages
from vision_ttt.data.coco_reading import read_coco
from vision_ttt.tasks.segmentation.config import SegmentationData
from vision_ttt.tasks.segmentation.task import open_parts

SETTINGS = LetterSettings(side=96, classes=3, glyph=18, seed=3)
LETTERS = LetterSet(SETTINGS, train_images=54, validation_images=12, test_images=15)
LAYOUTS = {
    "train": ("train2017", "training", "train"),
    "validation": ("dev2017", "development", "dev"),
    "test": ("val2017", "validation", "val"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache") / "letters"
    render_letter_folder(folder, LETTERS)
    return folder


def _contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("split", LAYOUTS)
def test_a_detector_reads_the_letters_that_count(folder: Path, split: str):
    part = LAYOUTS[split][0]
    told = read_coco(folder / "coco" / "annotations" / f"instances_{part}.json")
    assert told.classes == SETTINGS.names
    assert len(told) == LETTERS.images[split]
    assert told.counts.faulty_images == told.counts.clipped_objects == 0
    for index, read in enumerate(CocoImages(told, folder / "coco" / part, told.places())):
        picture = render_letters(SETTINGS, split, index)
        counting = [letter for letter in picture.letters if letter.counts]
        assert read.image.tobytes() == picture.image.tobytes()
        assert read.labels.tolist() == [letter.label + 1 for letter in counting]
        painted = np.zeros((96, 96), np.uint8)
        for box, label, mask, letter in zip(
            read.boxes, read.labels, read.masks, counting, strict=True
        ):
            painted[rle_masks.decode(mask) > 0] = label
            low, high = letter.outline.min(axis=0), letter.outline.max(axis=0) + 1
            assert box.tolist() == [*low, *high]
        assert np.array_equal(painted, picture.labels())


def test_coco_files_tell_the_mark_and_the_distance(folder: Path):
    file = folder / "coco" / "annotations" / "instances_val2017.json"
    content = json.loads(file.read_text())
    of_image = {image["id"]: [] for image in content["images"]}
    for annotation in content["annotations"]:
        of_image[annotation["image_id"]].append(annotation)
    for index, image in enumerate(content["images"]):
        picture = render_letters(SETTINGS, "test", index)
        counting = [letter for letter in picture.letters if letter.counts]
        left, top, width, height = image["mark"]["bbox"]
        assert (left + width / 2, top + height / 2) == picture.mark
        assert image["mark"]["ink"] == tuple(INKS)[picture.ink]
        assert image["ringed"] == SETTINGS.names[picture.ringed]
        for annotation, letter in zip(of_image[image["id"]], counting, strict=True):
            assert annotation["distance"] == pytest.approx(letter.distance, abs=0.05)
            mask = rle_masks.frPyObjects(annotation["segmentation"], 96, 96)
            assert annotation["area"] == rle_masks.area(rle_masks.merge(mask))


def test_splits_share_no_id(folder: Path):
    ids = {"images": [], "annotations": []}
    for part, _, _ in LAYOUTS.values():
        file = folder / "coco" / "annotations" / f"instances_{part}.json"
        content = json.loads(file.read_text())
        for name, own in ids.items():
            own += [entry["id"] for entry in content[name]]
    for own in ids.values():
        assert len(own) == len(set(own)) > 80


def test_a_segmenter_reads_what_is_rendered_on_the_fly(folder: Path):
    data = SegmentationData(root=str(folder / "ade"))
    classes, parts = open_parts(data)
    train, test = parts["train"], parts["test"]
    development = {"test_images": "images/development", "test_masks": "annotations/development"}
    validation = open_parts(dataclasses.replace(data, **development))[1]["test"]
    for split, read in (("train", train), ("validation", validation), ("test", test)):
        rendered = LetterImages(SETTINGS, split, LETTERS.images[split])
        assert classes == rendered.classes
        for on_disk, on_the_fly in zip(read, rendered, strict=True):
            assert on_disk.image.tobytes() == on_the_fly.image.tobytes()
            assert np.array_equal(on_disk.labels, on_the_fly.labels)


def test_a_classifier_reads_which_letter_has_the_ring(folder: Path):
    splits = open_dataset(DatasetSpec(str(folder / "ringed")))
    assert splits.classes == SETTINGS.names
    assert (len(splits.train), len(splits.test)) == (54, 15)
    for split, (_, _, part) in LAYOUTS.items():
        files = sorted((folder / "ringed" / part).glob("*/*.png"), key=lambda path: path.name)
        assert len(files) == LETTERS.images[split]
        for index, file in enumerate(files):
            picture = render_letters(SETTINGS, split, index)
            assert file.parent.name == SETTINGS.names[picture.ringed]
            assert Image.open(file).tobytes() == picture.image.tobytes()


def test_killed_and_completed_later_is_the_same_set(folder: Path, tmp_path: Path):
    class Killed(BaseException):
        pass

    def kill_at(pictures: int) -> None:
        if pictures == 50:
            raise Killed

    other = tmp_path / "letters"
    with pytest.raises(Killed):
        render_letter_folder(other, LETTERS, kill_at)
    assert not holds_letters(other, LETTERS)
    kept = other / "coco/train2017/000000000001.png"
    before = kept.stat().st_mtime_ns
    (other / "coco/train2017/000000000052.png").write_bytes(b"half a pict")  # as killed within it
    told = []
    render_letter_folder(other, LETTERS, told.append)
    assert told == [50, 54, 66, 81]
    assert kept.stat().st_mtime_ns == before
    assert _contents(other) == _contents(folder)
    assert holds_letters(other, LETTERS)


def test_other_sets_and_other_files_are_kept(folder: Path, tmp_path: Path):
    others = dataclasses.replace(SETTINGS, glyph=20)
    with pytest.raises(DatasetError, match=r"another set of letters: glyph 18 \(not 20\)"):
        render_letter_folder(folder, dataclasses.replace(LETTERS, settings=others))
    (tmp_path / "sheet.png").touch()
    assert not holds_letters(tmp_path, LETTERS)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(DatasetError, match=r"no set of letters, but thesis\.tex"):
        render_letter_folder(tmp_path, LETTERS)
    assert {path.name for path in tmp_path.iterdir()} == {"sheet.png", "thesis.tex"}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("[]", r"manifest\.json is damaged: it holds \[\], not an object"),
        ("{", r"manifest\.json is damaged"),
        (json.dumps({**LETTERS.asked, "blur": 2}), r"another set of letters: blur 2 \(not None\)"),
    ],
)
def test_other_manifests_are_refused(tmp_path: Path, content: str, told: str):
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(DatasetError, match=told):
        render_letter_folder(tmp_path, LETTERS)


def test_classes_without_a_ring_are_named(tmp_path: Path):
    letters = dataclasses.replace(LETTERS, train_images=1)
    with pytest.warns(RuntimeWarning, match="no train picture has a ring around") as warned:
        render_letter_folder(tmp_path, letters)
    (ringed,) = (path.parent.name for path in (tmp_path / "ringed/train").rglob("*.png"))
    others = ", ".join(name for name in SETTINGS.names if name != ringed)
    assert [f"around {others}:" in str(each.message) for each in warned] == [True]


@pytest.mark.parametrize("values", [{"train_images": 0}, {"validation_images": 1.0}])
def test_numbers_of_pictures_are_checked(values: dict):
    ((name, value),) = values.items()
    with pytest.raises(ValueError, match=f"{name} is {value}; it must be a whole number from 1"):
        LetterSet(**values)


def test_outlines_of_any_form_survive_their_encoding():
    generator = np.random.default_rng(0)
    for _ in range(3):
        # One run of pixels, or none, in each column: no holes, and several parts.
        first, last = generator.integers(0, 14, (2, 1, 9))
        mask = (np.arange(13)[:, None] >= first) & (np.arange(13)[:, None] < last)
        encoded = rle_masks.merge(rle_masks.frPyObjects(polygons(mask), 13, 9))
        assert np.array_equal(rle_masks.decode(encoded), mask)
