"""Images with masks: pairs, class names, labels, and every way in which they do not fit."""

import pickle
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vision_ttt.data import DatasetError, ImageError
from vision_ttt.data.mask_folders import (
    IGNORED,
    MaskError,
    MaskFolders,
    open_mask_folders,
    read_classes,
    read_labels,
)

CLASSES = ("sky", "sea", "sand")


def _image(path: Path, width: int = 6, height: int = 4) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height), (9, 9, 9)).save(path)
    return path


def _mask(path: Path, labels: np.ndarray, mode: str | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.fromarray(labels)
    if mode == "P":
        picture.putpalette([7] * 768)
    elif mode is not None:
        picture = picture.convert(mode)
    picture.save(path)
    return path


def _folders(tmp_path: Path, names: list[str], **options: bool) -> MaskFolders:
    for number, name in enumerate(names):
        _image(tmp_path / "images" / f"{name}.jpg")
        _mask(tmp_path / "masks" / f"{name}.png", np.full((4, 6), number % 3, np.uint8))
    return _open(tmp_path, **options)


def _open(tmp_path: Path, *, zero_is_unlabelled: bool = False) -> MaskFolders:
    return open_mask_folders(
        tmp_path / "images", tmp_path / "masks", CLASSES, zero_is_unlabelled=zero_is_unlabelled
    )


def test_images_and_masks_are_paired_by_name_in_folders_too(tmp_path: Path) -> None:
    folders = _folders(tmp_path, ["b", "a", "town/a"])
    assert len(folders) == 3
    assert [image.relative_to(tmp_path / "images").as_posix() for image, _ in folders.pairs] == [
        "a.jpg",
        "b.jpg",
        "town/a.jpg",
    ]
    image, labels = folders[2]
    assert (image.mode, image.size) == ("RGB", (6, 4))
    assert labels.dtype == np.uint8
    assert (labels == 2).all()


@pytest.mark.parametrize("mode", [None, "P", "I;16"])
def test_labels_are_the_values_of_any_single_channel(tmp_path: Path, mode: str | None) -> None:
    stored = np.array([[0, 1, 2], [255, 3, 1]], np.uint8)
    if mode == "I;16":
        path = _mask(tmp_path / "a.png", stored.astype(np.uint16))
    else:
        path = _mask(tmp_path / "a.png", stored, mode)
    labels = read_labels(path, CLASSES, zero_is_unlabelled=True)
    assert labels.tolist() == [[IGNORED, 0, 1], [IGNORED, 2, 0]]
    with pytest.raises(MaskError, match="1 pixels have the label 3; the 3 classes are 0 to 2"):
        read_labels(path, CLASSES)


def test_labels_beyond_the_classes_are_named_with_the_file(tmp_path: Path) -> None:
    stored = np.array([[4, 4, 77], [0, 254, 255]], np.uint8)
    path = _mask(tmp_path / "a.png", stored)
    told = "4 pixels have the label 4, 77, 254; the 3 classes are 1 to 3, and 0 and 255 stand"
    with pytest.raises(MaskError, match=f"{re.escape(str(path))}: {told}") as caught:
        read_labels(path, CLASSES, zero_is_unlabelled=True)
    assert caught.value.name == str(path)
    wide = _mask(tmp_path / "wide.png", np.full((2, 2), 300, np.uint16))
    with pytest.raises(MaskError, match="label 300"):
        read_labels(wide, CLASSES)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA"])
def test_masks_of_several_channels_are_refused(tmp_path: Path, mode: str) -> None:
    path = _mask(tmp_path / "a.png", np.zeros((2, 2), np.uint8), mode)
    with pytest.raises(MaskError, match=f"its pixels are {mode}; a mask has one channel"):
        read_labels(path, CLASSES)


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    folders = _folders(tmp_path, ["a", "b", "c", "d"])
    (tmp_path / "images/a.jpg").write_bytes(b"no image")
    mask = tmp_path / "masks/b.png"
    mask.write_bytes(mask.read_bytes()[:-30])
    (tmp_path / "masks/c.png").unlink()
    (tmp_path / "images/d.jpg").unlink()
    with pytest.raises(ImageError, match=r"a\.jpg: not an image"):
        folders[0]
    with pytest.raises(MaskError, match=r"b\.png: "):
        folders[1]
    with pytest.raises(MaskError, match=r"c\.png: it no longer exists"):
        folders[2]
    with pytest.raises(ImageError, match=r"d\.jpg: it no longer exists"):
        folders[3]


def test_a_mask_of_another_size_is_named(tmp_path: Path) -> None:
    folders = _folders(tmp_path, ["a"])
    _mask(tmp_path / "masks/a.png", np.zeros((6, 4), np.uint8))
    with pytest.raises(MaskError, match=r"it is of 4 × 6 pixels; its image .*a\.jpg is of 6 × 4"):
        folders[0]


def test_files_without_a_partner_are_named(tmp_path: Path) -> None:
    _folders(tmp_path, ["a", "b"])
    for number in range(7):
        _image(tmp_path / f"images/x{number}.jpg")
    with pytest.raises(DatasetError, match=r"x5\.jpg and 1 more have no mask: .*masks needs a \."):
        _open(tmp_path)
    for number in range(7):
        (tmp_path / f"images/x{number}.jpg").unlink()
    _mask(tmp_path / "masks/alone.png", np.zeros((4, 6), np.uint8))
    with pytest.raises(DatasetError, match=r"alone\.png has no image of the same name"):
        _open(tmp_path)
    _image(tmp_path / "images/alone.jpg")
    _image(tmp_path / "images/alone.png")
    with pytest.raises(DatasetError, match="differ by their suffix alone"):
        _open(tmp_path)


def test_folders_that_are_missing_or_empty_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="images"):
        _open(tmp_path)
    _image(tmp_path / "images/a.jpg")
    (tmp_path / "masks").mkdir()
    _image(tmp_path / "masks/a.jpg")  # lossy, no mask
    with pytest.raises(DatasetError, match=r"masks has no image \(accepted: \.png\)"):
        _open(tmp_path)
    (tmp_path / "masks/a.jpg").rename(tmp_path / "file")
    (tmp_path / "masks").rmdir()
    (tmp_path / "file").rename(tmp_path / "masks")
    with pytest.raises(DatasetError, match="masks is a file"):
        _open(tmp_path)


def test_classes_are_a_list_or_a_table(tmp_path: Path) -> None:
    (tmp_path / "classes.txt").write_text("\ufeffsky\n deep  sea\r\n", encoding="utf-8")
    assert read_classes(tmp_path) == ("sky", "deep sea")
    table = "Idx\tRatio\tTrain\tVal\tName\n1\t0.15\t11664\t1172\twall\n2\t0.1\t60\t6\tedifice, x\n"
    (tmp_path / "objectInfo150.txt").write_text(table)
    assert read_classes(tmp_path, tmp_path / "objectInfo150.txt") == ("wall", "edifice, x")
    with pytest.raises(DatasetError, match=r"objectInfo150\.txt and classes\.txt; name the file"):
        read_classes(tmp_path)
    (tmp_path / "classes.txt").unlink()
    assert read_classes(tmp_path) == ("wall", "edifice, x")


def _repeated(text: str) -> Callable[[int], str]:
    return lambda count: "".join(text.format(number) for number in range(count))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "has 0 classes; 2 to 254 are accepted"),
        (b"sky\n", "has 1 classes"),
        (_repeated("c{}\n")(255).encode(), "has 255 classes"),
        (b"sky\n\nsea\n", "class 2 has no name"),
        (b"sky\nsea\nsky\n", "has sky more than once"),
        (b"\xff\xfesky\n", "not a text in UTF-8"),
        (b"Idx\tWord\n1\tsky\n", 'no column "Name" among Idx, Word'),
        (b"Idx\tName\n1\tsky\n3\tsea\n", "line 3 has the Idx 3; 2 is next"),
        (b"Idx\tName\n1\tsky\n2\n", "line 3 has 1 columns; the header has 2"),
    ],
)
def test_class_files_that_do_not_fit_are_refused(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "classes.txt").write_bytes(content)
    with pytest.raises(DatasetError, match=told):
        read_classes(tmp_path)


@pytest.mark.parametrize("mode", ["1", "L", "P", "I;16"])
def test_a_mask_takes_few_bytes_a_pixel(tmp_path: Path, mode: str) -> None:
    """A mask of one label has thousands of pixels to a byte of its file."""
    Image.new(mode, (1200, 1000), 1).save(tmp_path / "mask.png")
    tracemalloc.start()
    labels = read_labels(tmp_path / "mask.png", ("a", "b"), zero_is_unlabelled=True)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (labels == 0).all()
    assert peak < 6.5 * labels.size


def test_missing_class_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"has no objectInfo150\.txt or classes\.txt; name the"):
        read_classes(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"names\.txt"):
        read_classes(tmp_path, tmp_path / "names.txt")
    with pytest.raises(DatasetError, match="it is a folder, not a file"):
        read_classes(tmp_path, tmp_path)
