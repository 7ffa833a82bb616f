"""Fashion-MNIST and ELPV, from small files in their formats."""

import gzip
import struct
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vision_ttt.data import DatasetError, DatasetSpec, fashion_mnist, open_dataset


def idx(content: np.ndarray) -> bytes:
    return struct.pack(f">{1 + content.ndim}I", 0x800 + content.ndim, *content.shape) + bytes(
        content
    )


@pytest.fixture
def clothes(tmp_path: Path) -> Path:
    """Five images for training, compressed, and three for test, not compressed."""
    for name, count in (("train", 5), ("t10k", 3)):
        images = np.arange(count * 784, dtype=np.uint8).reshape(count, 28, 28)
        files = {
            f"{name}-images-idx3-ubyte": idx(images),
            f"{name}-labels-idx1-ubyte": idx(np.arange(count, dtype=np.uint8)),
        }
        for file, content in files.items():
            if name == "train":
                (tmp_path / f"{file}.gz").write_bytes(gzip.compress(content))
            else:
                (tmp_path / file).write_bytes(content)
    return tmp_path


def test_fashion_mnist(clothes: Path) -> None:
    data = open_dataset(DatasetSpec("fashion-mnist", str(clothes)))
    assert (len(data.train), len(data.test), data.classes[9]) == (5, 3, "ankle boot")
    image, target = data.train[4]
    assert (image.mode, image.size, target) == ("RGB", (28, 28), 4)
    expected = np.arange(5 * 784, dtype=np.uint8).reshape(5, 28, 28)[4]
    assert (np.asarray(image) == expected[..., None]).all()


def test_fashion_mnist_of_torchvision(clothes: Path) -> None:
    raw = clothes / "root" / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for file in clothes.glob("*ubyte*"):
        file.rename(raw / file.name)
    data = open_dataset(DatasetSpec("fashion-mnist", str(clothes / "root")))
    assert (len(data.train), len(data.test)) == (5, 3)


def test_fashion_mnist_is_found_where_debian_puts_it(
    clothes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fashion_mnist, "INSTALLED", clothes)
    assert len(open_dataset(DatasetSpec("fashion-mnist")).test) == 3
    monkeypatch.setattr(fashion_mnist, "INSTALLED", clothes / "missing")
    with pytest.raises(FileNotFoundError, match=r"dataset-fashion-mnist.*download=True"):
        open_dataset(DatasetSpec("fashion-mnist"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "unpack"),
        (struct.pack(">4I", 0x803, 3, 29, 28), "29"),
        (struct.pack(">4I", 0x803, 2**32 - 1, 28, 28), "header"),
        (struct.pack(">4I", 0x801, 3, 28, 28), "header"),
        (struct.pack(">4I", 0x803, 3, 28, 28) + b"1", "2352 bytes"),
        (idx(np.zeros((2, 28, 28), np.uint8)), "2 images"),
    ],
)
@pytest.mark.parametrize("compressed", [False, True])
def test_damaged_files_of_fashion_mnist(
    clothes: Path, content: bytes, message: str, compressed: bool
) -> None:
    path = clothes / "t10k-images-idx3-ubyte"
    path.unlink()
    if compressed:
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(content))
    else:
        path.write_bytes(content)
    with pytest.raises(DatasetError, match=message):
        open_dataset(DatasetSpec("fashion-mnist", str(clothes)))


def test_labels_of_fashion_mnist_are_classes(clothes: Path) -> None:
    (clothes / "t10k-labels-idx1-ubyte").write_bytes(idx(np.array([1, 2, 10], np.uint8)))
    with pytest.raises(DatasetError, match="label 10"):
        open_dataset(DatasetSpec("fashion-mnist", str(clothes)))


@pytest.fixture
def cells(tmp_path: Path) -> Path:
    """Twenty cells of every probability and kind."""
    (tmp_path / "images").mkdir()
    lines = []
    for number in range(160):
        name = f"images/cell{number:04}.png"
        Image.new("L", (300, 300), number).save(tmp_path / name)
        probability = ("0.0", "0.333", "0.6666666666666666", "1.0")[number % 4]
        lines.append(f"{name}  {probability}    {'mono' if number % 8 < 4 else 'poly'}")
    (tmp_path / "labels.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_elpv(cells: Path) -> None:
    spec = DatasetSpec("elpv", str(cells), test_fraction=0.25)
    data = open_dataset(spec)
    assert (len(data.train), len(data.test)) == (120, 40)
    assert data.classes == ("functional", "defective")
    kinds = Counter(data.test.dataset.kinds[index] for index in data.test.indices)
    assert kinds == dict.fromkeys(("0 mono", "0 poly", "1 mono", "1 poly"), 10)
    image, target = data.test[0]
    place = data.test.indices[0]
    assert (image.size, image.getpixel((0, 0)), target) == ((300, 300), (place,) * 3, place % 4 > 1)


def test_grades_of_elpv_are_the_probabilities_of_the_same_cells(cells: Path) -> None:
    two, four = (open_dataset(DatasetSpec(name, str(cells))) for name in ("elpv", "elpv-grades"))
    assert four.classes == ("0", "1/3", "2/3", "1")
    assert four.held_out == two.held_out
    places = four.test.indices
    assert [four.test[index][1] for index in range(len(places))] == [each % 4 for each in places]


def test_the_split_seed_draws_other_test_images(cells: Path) -> None:
    splits = [open_dataset(DatasetSpec("elpv", str(cells), split_seed=seed)) for seed in (0, 1, 0)]
    assert splits[0].held_out == splits[2].held_out != splits[1].held_out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("images/a.png 1.0", "line 2"),
        ("images/a.png one mono", "line 2"),
        ("images/a.png 1.5 mono", "line 2: the defect probability is 1.5; it must be from 0 to 1"),
        ("images/a.png nan mono", "line 2: the defect probability is nan"),
        ("../a.png 1.0 mono", "not in the folder"),
        ("/a.png 1.0 mono", "not in the folder"),
    ],
)
def test_damaged_labels_of_elpv(cells: Path, line: str, message: str) -> None:
    (cells / "labels.csv").write_text(f"images/cell0000.png 1.0 mono\n{line}\n")
    with pytest.raises(DatasetError, match=message):
        open_dataset(DatasetSpec("elpv", str(cells)))


def test_elpv_of_the_installed_package(cells: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = cells / "site" / "elpv_dataset"
    root.mkdir(parents=True)
    (root / "__init__.py").write_text("raise SystemExit('the code of a dataset was run')")
    (root / "data").mkdir()
    (root / "data" / "labels.csv").write_text((cells / "labels.csv").read_text())
    (root / "data" / "images").symlink_to(cells / "images")
    monkeypatch.syspath_prepend(root.parent)
    assert len(open_dataset(DatasetSpec("elpv")).train) == 128
    assert "elpv_dataset" not in sys.modules


def test_elpv_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="pip install elpv-dataset"):
        open_dataset(DatasetSpec("elpv", str(tmp_path)))


def test_labels_of_elpv_in_another_encoding(cells: Path) -> None:
    (cells / "labels.csv").write_bytes("images/zelle-ä.png 0.0 mono".encode("latin-1"))
    with pytest.raises(DatasetError, match="is not a text in UTF-8"):
        open_dataset(DatasetSpec("elpv", str(cells)))
