"""Rendered scenes: the same ones each time, and whole COCO and ADE20K data sets."""

import contextlib
import dataclasses
import io
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.mask import toBbox

from vision_ttt.data import DatasetError, DatasetSpec, Digits, open_dataset
from vision_ttt.data.scene_images import SPLITS, _scans, render_object, render_scene
from vision_ttt.data.scene_shapes import CLASSES, shape_coverage
from vision_ttt.data.scenes import ADE_CLASSES, SceneSettings, render_scenes

SETTINGS = SceneSettings(
    side=96, train_images=110, test_images=20, seed=3, train_objects=60, test_objects=30
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache") / "scenes"
    render_scenes(folder, SETTINGS)
    return folder


@pytest.fixture(scope="module")
def coco(folder: Path) -> COCO:
    return _coco(folder, "train2017")


def _coco(folder: Path, part: str) -> COCO:
    with contextlib.redirect_stdout(io.StringIO()):
        return COCO(str(folder / "coco" / "annotations" / f"instances_{part}.json"))


def _contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_scene_depends_on_seed_split_and_index_alone():
    scene, again = (render_scene(3, "train", 17, 96) for _ in range(2))
    assert scene.image.tobytes() == again.image.tobytes()
    assert len(scene.instances) == len(again.instances) > 0
    for one, other in zip(scene.instances, again.instances, strict=True):
        assert one.label == other.label
        assert np.array_equal(one.mask, other.mask)
    for others in ((4, "train", 17), (3, "test", 17), (3, "train", 18)):
        assert render_scene(*others, 96).image.tobytes() != scene.image.tobytes()


def test_splits_share_no_scan():
    scans = {
        split: {scan.tobytes() for own in _scans(split).values() for scan in own}
        for split in SPLITS
    }
    digits = {each.digit for each in CLASSES if each.digit is not None}
    for split in SPLITS:
        assert len(scans[split]) == sum(each in digits for each in Digits(split).targets)
    assert not scans["train"] & scans["test"]


def test_annotations_agree_with_pycocotools(coco: COCO):
    crowds = Counter()
    for annotation in coco.loadAnns(coco.getAnnIds()):
        mask = coco.annToMask(annotation)
        assert mask.shape == (96, 96)
        assert mask.sum() == annotation["area"] >= 24
        assert toBbox(coco.annToRLE(annotation)).tolist() == annotation["bbox"]
        crowds[annotation["iscrowd"]] += 1
    assert set(crowds) == {0, 1}
    assert {each["name"] for each in coco.loadCats(coco.getCatIds())} == {c.name for c in CLASSES}


def test_the_set_is_as_promised(folder: Path, coco: COCO):
    every = coco.loadAnns(coco.getAnnIds())
    single = [each for each in every if not each["iscrowd"]]
    sides = [max(each["bbox"][2:]) for each in single]
    assert max(sides) / min(sides) >= 8
    assert {each["category_id"] for each in single} == {each.category for each in CLASSES}
    assert len(coco.getImgIds()) == 110
    assert 0 < 110 - len({each["image_id"] for each in every}) < 20  # images without objects
    assert not set(coco.getImgIds()) & set(_coco(folder, "val2017").getImgIds())
    boxes = {}
    for each in single:
        boxes.setdefault(each["image_id"], []).append(each["bbox"])
    assert any(_overlap(a, b) for own in boxes.values() for a in own for b in own if a is not b)


def _overlap(one: list[int], other: list[int]) -> bool:
    return all(
        one[axis] < other[axis] + other[axis + 2] and other[axis] < one[axis] + one[axis + 2]
        for axis in (0, 1)
    )


@pytest.mark.parametrize(
    ("coco_part", "ade_part"), [("train2017", "training"), ("val2017", "validation")]
)
def test_ade_masks_agree_with_coco(folder: Path, coco_part: str, ade_part: str):
    coco = _coco(folder, coco_part)
    ade = folder / "ade"
    names = {each["id"]: each["name"] for each in coco.loadCats(coco.getCatIds())}
    masks = sorted((ade / "annotations" / ade_part).iterdir())
    pictures = sorted((ade / "images" / ade_part).iterdir())
    assert [path.stem for path in masks] == [path.stem for path in pictures]
    assert len(masks) == len(coco.getImgIds())
    unlabelled = 0
    for number, mask_path, picture in zip(sorted(coco.getImgIds()), masks, pictures, strict=True):
        file = folder / "coco" / coco_part / coco.loadImgs(number)[0]["file_name"]
        assert file.read_bytes() == picture.read_bytes()
        assert Image.open(file).size == (96, 96)
        values = np.asarray(Image.open(mask_path))
        covered = np.zeros_like(values)
        for annotation in coco.loadAnns(coco.getAnnIds(imgIds=number)):
            mask = coco.annToMask(annotation).astype(bool)
            value = 1 + ADE_CLASSES.index(names[annotation["category_id"]])
            assert (values[mask] == value).all()
            assert not covered[mask].any()  # masks are the visible parts
            covered[mask] = 1
        assert set(np.unique(values[covered == 0])) <= {0, 1}
        unlabelled += bool((values == 0).any())
    info = (ade / "objectInfo150.txt").read_text().splitlines()
    assert info[1:] == [f"{n}\t{name}" for n, name in enumerate(ADE_CLASSES, start=1)]
    assert ade_part == "validation" or 0 < unlabelled < 30


def test_single_objects_are_a_folder_of_images_by_class(folder: Path):
    splits = open_dataset(DatasetSpec(str(folder / "objects")))
    assert sorted(splits.classes) == sorted(each.name for each in CLASSES)
    assert (len(splits.train), len(splits.test)) == (60, 30)
    picture, label = render_object(3, "test", 5, 48)
    (path,) = (folder / "objects/val").glob("*/00000005.png")
    assert path.parent.name == CLASSES[label].name
    assert Image.open(path).tobytes() == picture.tobytes()


def test_killed_and_rendered_again_is_the_same_set(folder: Path, tmp_path: Path):
    class Killed(BaseException):
        pass

    def kill_at(scenes: int) -> None:
        if scenes == 30:
            raise Killed

    other = tmp_path / "scenes"
    with pytest.raises(Killed):
        render_scenes(other, SETTINGS, kill_at)
    assert not other.exists()
    told = []
    render_scenes(other, SETTINGS, told.append)
    assert told == list(range(1, 131))
    assert [path.name for path in tmp_path.iterdir()] == ["scenes"]
    assert _contents(other) == _contents(folder)


def test_a_whole_set_is_used_again(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("vision_ttt.data.scenes.render_scene", None)
    told = []
    render_scenes(folder, SETTINGS, told.append)
    assert told == [130]


def test_other_sets_and_other_files_are_kept(folder: Path, tmp_path: Path):
    with pytest.raises(DatasetError, match=r"another set of scenes: seed 3 \(not 4\)"):
        render_scenes(folder, dataclasses.replace(SETTINGS, seed=4))
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(DatasetError, match=r"no set of scenes, but thesis\.tex"):
        render_scenes(tmp_path, SETTINGS)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_damaged_manifest_is_named(tmp_path: Path):
    (tmp_path / "manifest.json").write_text("[1]")
    with pytest.raises(DatasetError, match=r"manifest\.json is damaged"):
        render_scenes(tmp_path, SETTINGS)


@pytest.mark.parametrize(
    "values",
    [
        {"side": 32},
        {"object_side": 8},
        {"train_objects": 0},
        {"train_images": 0},
        {"seed": -1},
        {"side": 96.0},
        {"seed": True},
    ],
)
def test_settings_out_of_range_are_named(values: dict):
    (name,) = values
    with pytest.raises(ValueError, match=f"{name} is {values[name]}"):
        dataclasses.replace(SETTINGS, **values)


@pytest.mark.parametrize("name", [each.name for each in CLASSES if each.digit is None])
def test_shapes_have_their_size(name: str):
    for seed in range(5):
        coverage = shape_coverage(name, 40, np.random.default_rng(seed))
        assert coverage.min() == 0
        assert coverage.max() == 1
        rows, columns = np.nonzero(coverage >= 0.5)
        spans = np.ptp(rows) + 1, np.ptp(columns) + 1
        assert 40 * 0.6 < min(spans) <= max(spans) < 40 * 1.25
