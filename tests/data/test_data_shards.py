"""Webdataset shards are read at any place; what is wrong with one is told by name."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from vision_ttt.data import DatasetError, DatasetSpec, ImageError, open_dataset
from vision_ttt.engine import train
from vision_ttt.recipes import resolve
from vision_ttt.tasks import load_model


@pytest.fixture
def shards(image_folder: Path, tmp_path: Path, write_shard: Callable[..., None]) -> Path:
    """`image_folder` as three shards, two of them for training, with names of the classes."""
    root = tmp_path / "shards"
    for split, parts in (("train", 2), ("val", 1)):
        paths = sorted((image_folder / split).rglob("*.png"))
        samples = [
            (f"{path.parent.name}-{path.stem}", path.read_bytes(), str(int("light" in path.parts)))
            for path in paths
        ]
        for part in range(parts):
            write_shard(root / f"faces-{split}-{part:04}.tar", samples[part::parts])
    (root / "classes.txt").write_text("dark\nlight\n")
    return root


def test_any_place_of_any_shard(shards: Path, image_folder: Path) -> None:
    data = open_dataset(DatasetSpec(str(shards)))
    assert (len(data.train), len(data.test), data.classes) == (16, 8, ("dark", "light"))
    expected = open_dataset(DatasetSpec(str(image_folder))).test
    for index in (7, 0, 3):
        (image, target), (other, label) = data.test[index], expected[index]
        assert image.tobytes() == other.tobytes()
        assert target == label
    (shards / "classes.txt").write_text("\ufeffdark\nlight\n\n", encoding="utf-8")
    assert open_dataset(DatasetSpec(str(shards))).classes == ("dark", "light")
    (shards / "classes.txt").unlink()
    assert open_dataset(DatasetSpec(str(shards))).classes == ("0", "1")
    assert len(open_dataset(DatasetSpec(str(shards), num_classes=5)).classes) == 5


def test_hidden_shards_are_left_out(shards: Path) -> None:
    (shards / "._faces-train-0000.tar").write_bytes(b"what a file browser wrote")
    (shards / ".cache").mkdir()
    (shards / "faces-train-0000.tar").rename(shards / ".cache" / "faces-train-0000.tar")
    data = open_dataset(DatasetSpec(str(shards)))
    assert (len(data.train), len(data.test)) == (8, 8)


def test_shards_without_a_test_part_are_split(shards: Path) -> None:
    for path in shards.glob("*val*"):
        path.unlink()
    data = open_dataset(DatasetSpec(str(shards), test_fraction=0.25))
    assert (len(data.train), len(data.test)) == (12, 4)


@pytest.mark.parametrize(
    ("level", "target", "told"),
    [
        (1, None, "a.png has no .cls file"),
        (None, "1", "has no images"),
        (1, "cat", "a.cls holds no class index"),
        (1, "7", "class indices from 0 to 7"),
        (1, "-1", "class indices from -1"),
    ],
)
def test_what_is_wrong_is_told(
    shards: Path,
    write_shard: Callable[..., None],
    level: int | None,
    target: str | None,
    told: str,
) -> None:
    write_shard(shards / "faces-train-0002.tar", [("a", level, target)])
    with pytest.raises(DatasetError, match=told):
        open_dataset(DatasetSpec(str(shards)))


@pytest.mark.parametrize(
    ("samples", "told"),
    [
        ([("a", 1, "1"), ("a", 2, "1")], r"a\.png and a\.png have one key"),
        ([("a", 1, "1"), ("b", None, "1")], r"has no image beside b\.cls; accepted: "),
        ([("a", 1, "1"), ("a.final", 2, "1")], r"a\.final\.cls belongs to no image"),
    ],
)
def test_no_sample_is_left_out_silently(
    shards: Path, write_shard: Callable[..., None], samples: list[tuple], told: str
) -> None:
    write_shard(shards / "faces-train-0002.tar", samples)
    with pytest.raises(DatasetError, match=told):
        open_dataset(DatasetSpec(str(shards)))


def test_hidden_members_are_left_out(shards: Path, write_shard: Callable[..., None]) -> None:
    write_shard(
        shards / "faces-train-0002.tar", [("a", 1, "1"), ("._a", None, "1"), (".b/b", 2, None)]
    )
    assert len(open_dataset(DatasetSpec(str(shards))).train) == 17


def test_a_truncated_shard_is_named(shards: Path) -> None:
    path = shards / "faces-train-0001.tar"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 3 + 100])
    with pytest.raises(DatasetError, match=r"faces-train-0001\.tar is damaged"):
        open_dataset(DatasetSpec(str(shards)))


def test_images_of_a_shard_that_was_removed_are_damaged(shards: Path) -> None:
    train_set = open_dataset(DatasetSpec(str(shards))).train
    (shards / "faces-train-0001.tar").unlink()
    assert train_set[0][1] in (0, 1)
    with pytest.raises(ImageError, match=r"0001\.tar/.*\.png: the shard cannot be read: No such"):
        train_set[15]


def test_training_on_shards_is_training_on_their_images(
    shards: Path,
    write_shard: Callable[..., None],
    tiny_fields: Callable[..., dict],
    tmp_path: Path,
) -> None:
    fields = tiny_fields(dataset=str(shards), epochs=1, num_workers=1)
    result = train(resolve(fields))
    _, metadata = load_model(result.run_dir / "last.safetensors")
    assert metadata.carried["classes"] == ["dark", "light"]
    assert len(result.evaluation.targets) == 8
    write_shard(shards / "faces-train-0002.tar", [("x", b"none", "0"), ("y", 99, "1")])
    fields |= {
        "output": str(tmp_path / "bad"),
        "epochs": 8,
        "num_workers": 0,
    }  # one epoch leaves two images out
    with pytest.raises(ImageError, match=r"faces-train-0002\.tar/x\.png"):
        train(resolve(fields))
    fields |= {"skip_bad": True, "output": str(tmp_path / "skipped")}
    result = train(resolve(fields))
    assert [Path(name).name for name in result.metrics["damaged_items"]] == ["x.png"]


def test_what_is_no_shard_or_no_text(shards: Path) -> None:
    (shards / "classes.txt").write_bytes(b"d\xe4rk\nlight\n")
    with pytest.raises(DatasetError, match=r"classes\.txt is not a text in UTF-8"):
        open_dataset(DatasetSpec(str(shards)))
    os.mkfifo(shards / "pipe-train.tar")
    with pytest.raises(DatasetError, match=r"pipe-train\.tar cannot be read: it is a named pipe"):
        open_dataset(DatasetSpec(str(shards)))
