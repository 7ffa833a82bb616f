"""Folders and timm's datasets become two parts and class names, or say what is wrong."""

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from timm.data.dataset import ImageDataset, IterableImageDataset
from torchvision.datasets import ImageFolder

from vision_ttt.data import (
    DatasetError,
    DatasetSpec,
    ImageError,
    ImageSplits,
    open_dataset,
    sources,
    targets_of,
)


def test_digits() -> None:
    data = open_dataset(DatasetSpec("digits"))
    assert (len(data.train), len(data.test), data.classes[3]) == (1297, 500, "3")
    assert len(data.part("all")) == 1797
    with pytest.raises(ValueError, match="validation"):
        data.part("validation")


def test_a_fraction_of_each_class_for_training() -> None:
    def opened(fraction: float, seed: int = 0) -> ImageSplits:
        return open_dataset(DatasetSpec("digits", train_fraction=fraction, split_seed=seed))

    whole, tenth = opened(1), opened(0.1)
    counts = Counter(target for _, target in whole.train)
    expected = {digit: round(count / 10) for digit, count in counts.items()}
    assert Counter(target for _, target in tenth.train) == expected
    assert len(tenth.test) == 500
    assert set(opened(0.02).train.indices) < set(tenth.train.indices)
    assert opened(0.1).train.indices == tenth.train.indices != opened(0.1, 1).train.indices
    assert Counter(target for _, target in opened(1e-6).train) == dict.fromkeys(range(10), 1)
    with pytest.raises(DatasetError, match="split_seed is 1, but the digits has no use for it"):
        opened(1, 1)


def test_a_fraction_of_what_a_split_left_for_training(image_folder: Path) -> None:
    spec = DatasetSpec(str(image_folder / "train"), test_fraction=0.25)
    whole, part = open_dataset(spec), open_dataset(replace(spec, train_fraction=0.5))
    names = [[image.tobytes() for image, _ in each.train] for each in (whole, part)]
    assert Counter(target for _, target in part.train) == {0: 3, 1: 3}
    assert set(names[1]) <= set(names[0])
    assert (part.held_out, part.test.indices) == (whole.held_out, whole.test.indices)


def test_a_fraction_needs_classes_that_are_known(image_folder: Path) -> None:
    spec = DatasetSpec("torch/image_folder", str(image_folder), train_fraction=0.5)
    with pytest.raises(
        DatasetError, match=r"train_fraction is 0\.5; it must be 1 for torch/image_f"
    ):
        open_dataset(spec)


@pytest.mark.parametrize("root", ["pipe:touch x;", " PIPE:touch x", "pi\tpe:touch x"])
def test_a_dataset_runs_no_command(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """webdataset gives an address that begins with pipe: to a shell."""
    monkeypatch.setattr(sources.timm.data, "create_dataset", lambda *_, **__: pytest.fail("open"))
    with pytest.raises(DatasetError, match=r"dataset_root is .*, a command"):
        open_dataset(DatasetSpec("wds/x", dataset_root=root, num_classes=2))


@pytest.mark.parametrize("name", ["val", "validation", "test"])
def test_folder_with_splits(image_folder: Path, name: str) -> None:
    (image_folder / "val").rename(image_folder / name)
    (image_folder / "train" / ".cache").mkdir()
    data = open_dataset(DatasetSpec(str(image_folder)))
    assert (len(data.train), len(data.test)) == (16, 8)
    assert data.classes == ("dark", "light")
    image, target = data.test[7]
    assert (image.mode, target) == ("RGB", 1)


def test_folder_of_classes_is_split_the_same_way_every_time(image_folder: Path) -> None:
    spec = DatasetSpec(str(image_folder / "train"), test_fraction=0.25)
    data = open_dataset(spec)
    test = [data.test.dataset.samples[index] for index in data.test.indices]
    train = [data.train.dataset.samples[index] for index in data.train.indices]
    assert Counter(target for _, target in test) == {0: 2, 1: 2}
    assert len(train) == 12
    assert not set(test) & set(train)
    assert open_dataset(spec).test.indices == data.test.indices


def test_empty_class_folder_is_named(image_folder: Path) -> None:
    (image_folder / "train" / "vacant").mkdir()
    (image_folder / "val" / "vacant").mkdir()
    with pytest.raises(DatasetError, match="vacant"):
        open_dataset(DatasetSpec(str(image_folder)))


def test_class_with_one_image_cannot_be_split(image_folder: Path) -> None:
    lone = image_folder / "train" / "lone"
    lone.mkdir()
    Image.new("RGB", (8, 8)).save(lone / "1.png")
    with pytest.raises(DatasetError, match="lone"):
        open_dataset(DatasetSpec(str(image_folder / "train")))


def test_too_small_a_test_fraction(image_folder: Path) -> None:
    with pytest.raises(DatasetError, match=r"16 images in 2 classes.*0\.01 cannot split"):
        open_dataset(DatasetSpec(str(image_folder / "train"), test_fraction=0.01))


def test_classes_that_differ_between_splits_are_named(image_folder: Path) -> None:
    (image_folder / "val" / "light").rename(image_folder / "val" / "bright")
    with pytest.raises(DatasetError, match="bright, light"):
        open_dataset(DatasetSpec(str(image_folder)))


def test_missing_test_split_and_missing_classes(image_folder: Path, tmp_path: Path) -> None:
    shutil.rmtree(image_folder / "val")
    with pytest.raises(DatasetError, match="none of val"):
        open_dataset(DatasetSpec(str(image_folder)))
    (tmp_path / "hollow").mkdir()
    with pytest.raises(DatasetError, match="no class folders"):
        open_dataset(DatasetSpec(str(tmp_path / "hollow")))


def test_names_of_parts_are_no_classes(image_folder: Path) -> None:
    (image_folder / "train").rename(image_folder / "Training")
    with pytest.raises(DatasetError, match=r"are Training, val, which are the names of a dataset"):
        open_dataset(DatasetSpec(str(image_folder)))


def test_missing_folder_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"image folder.*no/such/place"):
        open_dataset(DatasetSpec("no/such/place"))


def test_name_that_timm_cannot_read() -> None:
    with pytest.raises(DatasetError, match="torch/nonsense"):
        open_dataset(DatasetSpec("torch/nonsense"))


def test_torchvision_dataset_by_name(image_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(image_folder.parent))
    root = f"~/{image_folder.name}"
    data = open_dataset(DatasetSpec("torch/image_folder", dataset_root=root))
    assert (len(data.train), len(data.test), data.classes) == (16, 8, ("dark", "light"))
    (image_folder / "train" / "dark" / "0.png").write_bytes(b"")
    with pytest.raises(ImageError, match="0 of torch/image_folder"):
        data.train[0]


def test_timm_reader_is_not_allowed_to_skip(
    image_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create(
        _name: str, *, root: str, split: str, is_training: bool, **_: object
    ) -> ImageDataset:
        assert is_training == (split == "train")
        return ImageDataset(str(Path(root) / {"train": "train", "validation": "val"}[split]))

    monkeypatch.setattr(sources.timm.data, "create_dataset", create)
    data = open_dataset(DatasetSpec("hfds/some/name", dataset_root=str(image_folder)))
    assert (len(data.train), data.classes) == (16, ("dark", "light"))
    assert data.train[15][1] == 1
    (image_folder / "train" / "light" / "7.png").write_bytes(b"nothing")
    with pytest.raises(ImageError, match="15 of hfds/some/name"):
        data.train[15]


def test_streamed_dataset_needs_the_number_of_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = [(Image.new("RGB", (8, 8)), 1)] * 3

    def create(*_: object, **__: object) -> IterableImageDataset:
        return IterableImageDataset("", reader=reader)

    monkeypatch.setattr(sources.timm.data, "create_dataset", create)
    with pytest.raises(DatasetError, match="num_classes"):
        open_dataset(DatasetSpec("wds/stream"))
    data = open_dataset(DatasetSpec("wds/stream", num_classes=2))
    assert (data.classes, len(data.train)) == (("0", "1"), 3)
    with pytest.raises(DatasetError, match="streamed"):
        data.part("all")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("dataset_root", "x"), ("train_split", "x"), ("test_split", "x")),
        ("test_fraction", 0.5),
    ],
)
def test_fields_that_a_dataset_would_ignore(field: str, value: object, image_folder: Path) -> None:
    for dataset in ("digits", str(image_folder)):
        with pytest.raises(DatasetError, match=f"{field} is {value!r}, but .* has no use for it"):
            open_dataset(DatasetSpec(dataset, **{field: value}))
    if field == "test_fraction":
        with pytest.raises(DatasetError, match="whose splits have names, has no use"):
            open_dataset(DatasetSpec("torch/image_folder", test_fraction=0.5))


def test_links_are_followed_in_torchvisions_order(image_folder: Path) -> None:
    dark = image_folder / "train" / "dark"
    (dark / "sub").mkdir()
    (dark / "0.png").rename(dark / "sub" / "0.png")
    (dark / "sub-1").symlink_to(image_folder / "val" / "dark")
    (dark / "notes.txt").write_text("no image")
    samples = sources.FolderImages(image_folder / "train").samples
    assert samples == ImageFolder(str(image_folder / "train")).samples
    assert len(samples) == 20


def test_what_is_hidden_in_a_class_is_no_image(image_folder: Path) -> None:
    dark = image_folder / "train" / "dark"
    shutil.copytree(dark, dark / ".ipynb_checkpoints")
    shutil.copy(dark / "0.png", dark / "._0.png")
    data = open_dataset(DatasetSpec(str(image_folder)))
    assert (len(data.train), len(data.test)) == (16, 8)


@pytest.mark.parametrize("target", ["..", "../..", ".", "../light"])
def test_links_that_lead_round_in_circles(image_folder: Path, target: str) -> None:
    train = image_folder / "train"
    (train / "dark" / "up").symlink_to(target)
    (train / "light" / "over").symlink_to("../dark")
    with pytest.raises(DatasetError, match="leads to a folder that it lies in"):
        open_dataset(DatasetSpec(str(image_folder)))


def test_a_folder_of_the_systems_is_no_dataset() -> None:
    with pytest.raises(DatasetError, match="class folder attr has no images"):
        open_dataset(DatasetSpec("/proc/self"))


def test_the_classes_of_a_part_of_a_part_are_known(image_folder: Path) -> None:
    spec = DatasetSpec(str(image_folder / "train"), train_fraction=0.5)
    train = open_dataset(spec).train
    assert targets_of(train).tolist() == [label for _, label in train]
