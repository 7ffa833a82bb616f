"""Folders of images with a mask of class labels each, as ADE20K's: pairs, class names, labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from torch.utils.data import Dataset

from vision_ttt.data.image_files import images_below
from vision_ttt.data.images import ImageError, decoded, open_labelled
from vision_ttt.data.shards import CLASSES_FILE, DatasetError, read_lines
from vision_ttt.errors import DamagedItem, some
from vision_ttt.file_kinds import IMAGE_SUFFIXES

IGNORED = 255
"""The label of pixels that have no class; masks hold it, and nothing else for them."""
CLASS_FILES = ("objectInfo150.txt", CLASSES_FILE)
"""Where a dataset's root has its class names, unless another file is given."""
MASK_SUFFIX = ".png"
"""Of mask files: a lossy format would change labels."""

# Single-channel modes of Pillow: of two levels, of 256, with a palette (the label is the index), of
# more bits.
_MASK_MODES = ("1", "L", "P", "I", "I;16", "I;16B")


class MaskError(DamagedItem):
    """A mask that cannot be used for its image. `name` is its file."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"mask {name}: {reason}", name)
        self.reason = reason

    def __reduce__(self) -> tuple:
        return type(self), (self.name, self.reason)  # so that worker processes can send it


class LabelledImage(NamedTuple):
    """An image with the classes of its pixels."""

    image: Image.Image
    """RGB, of H × W pixels."""
    labels: np.ndarray
    """[H, W] uint8: class indices, and `IGNORED`."""


@dataclass(frozen=True)
class MaskFolders(Dataset):
    """Images and masks that lie in two folders under the same names but for the suffix.

    Items are :class:`LabelledImage`, in the order of the images' paths. Reading one raises
    :class:`ImageError` or :class:`MaskError` where image or mask do not decode, differ in size, or
    the mask is not of one channel or has labels beyond the classes.
    """

    pairs: Sequence[tuple[Path, Path]]
    """Files of image and mask."""
    classes: tuple[str, ...]
    """Names by class index."""
    zero_is_unlabelled: bool
    """Whether a mask's 0 stands for no class and its k for class k − 1, as in ADE20K; otherwise k
    stands for class k. 255 stands for no class either way."""

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> LabelledImage:
        image_file, mask_file = self.pairs[index]
        labels = read_labels(mask_file, self.classes, zero_is_unlabelled=self.zero_is_unlabelled)
        height, width = labels.shape
        try:
            image = open_labelled(image_file, (width, height))
        except FileNotFoundError as error:
            raise ImageError(str(image_file), "it no longer exists") from error
        if image.size != (width, height):
            raise MaskError(
                str(mask_file),
                f"it is of {width} × {height} pixels; its image {image_file} is of"
                f" {image.width} × {image.height}",
            )
        return LabelledImage(image, labels)


def open_mask_folders(
    images: Path, masks: Path, classes: tuple[str, ...], *, zero_is_unlabelled: bool
) -> MaskFolders:
    """Pair the images below one folder with the masks below another; no file is opened.

    Raises:
        FileNotFoundError: a folder is not there.
        DatasetError: a folder has no image or mask, an image has no mask or a mask no image, or two
            files differ by their suffix alone; names them.
    """
    image_files, mask_files = _by_name(images), _by_name(masks, MASK_SUFFIX)
    for files, others, what in (
        (image_files, mask_files, f"mask: {masks} needs a {MASK_SUFFIX} of the same name"),
        (mask_files, image_files, f"image of the same name in {images}"),
    ):
        alone = [str(path) for name, path in files.items() if name not in others]
        if alone:
            has = "has" if len(alone) == 1 else "have"
            raise DatasetError(f"{some(alone)} {has} no {what}")
    pairs = [(path, mask_files[name]) for name, path in image_files.items()]
    return MaskFolders(pairs, classes, zero_is_unlabelled)


def read_labels(
    file: Path, classes: Sequence[str], *, zero_is_unlabelled: bool = False
) -> np.ndarray:
    """Return a mask's class indices [H, W] uint8, with `IGNORED` for pixels without a class.

    Raises:
        MaskError: the file is gone, does not decode, has several channels, or has a label beyond
            the classes (the message says which).
    """
    try:
        with decoded(file, str(file)) as mask:
            mode = mask.mode
            raw = np.array(mask) if mode in _MASK_MODES else None
    except FileNotFoundError as error:
        raise MaskError(str(file), "it no longer exists") from error
    except ImageError as error:
        raise MaskError(str(file), error.reason) from error
    if raw is None:
        raise MaskError(
            str(file),
            f"its pixels are {mode}; a mask has one channel, of class labels (a grey image or one"
            " with a palette)",
        )
    first = 1 if zero_is_unlabelled else 0
    levels, counts = _levels(raw)
    known = (levels == IGNORED) | ((levels >= first) & (levels < first + len(classes)))
    if zero_is_unlabelled:
        known |= levels == 0
    if not known.all():
        values = levels[~known].tolist()
        raise MaskError(
            str(file),
            f"{int(counts[~known].sum())} pixels have the label"
            f" {some([str(value) for value in values])}; the {len(classes)} classes are"
            f" {first} to {first + len(classes) - 1}, and"
            f" {'0 and ' if zero_is_unlabelled else ''}{IGNORED} stand for none",
        )
    # Bytes throughout: a small file may hold more pixels than there is memory for integers.
    labels = raw.astype(np.uint8, copy=False) - np.uint8(first)  # 0 - 1 is 255
    labels[raw == IGNORED] = IGNORED
    return labels


def read_classes(root: Path, file: Path | None = None) -> tuple[str, ...]:
    """Return a dataset's class names by index.

    Args:
        root: has one of `CLASS_FILES`, if `file` is None.
        file: one name per line, or a table with a header and columns separated by tabs. The column
            "Name" is read, and "Idx" must count from 1 (ADE20K's objectInfo150.txt).

    Raises:
        FileNotFoundError: `file` is not there.
        DatasetError: there is none, or several; it is not a text file, or is empty; a name or
            number is missing or repeated; there are fewer than 2 classes, or more than the labels
            of a byte.
    """
    if file is None:
        found = [root / name for name in CLASS_FILES if (root / name).is_file()]
        if len(found) != 1:
            listed = " and ".join(path.name for path in found) or f"no {' or '.join(CLASS_FILES)}"
            raise DatasetError(f"{root} has {listed}; name the file of class names (classes)")
        (file,) = found
    if not file.exists():
        raise FileNotFoundError(2, "No such file of class names", str(file))
    lines = read_lines(file)
    names = _from_table(lines, file) if lines and "\t" in lines[0] else lines
    names = [" ".join(name.split()) for name in names]
    empty = [number for number, name in enumerate(names, start=1) if not name]
    if empty:
        raise DatasetError(f"{file}: class {empty[0]} has no name")
    check_names(file, names)
    return tuple(names)


def check_names(source: Path | str, names: Sequence[str]) -> None:
    """Check that class names differ, and that there are from 2 to as many as a byte's labels.

    Raises:
        DatasetError: they do not; names their source.
    """
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DatasetError(f"{source} has {some(twice)} more than once")
    if not 2 <= len(names) <= IGNORED - 1:
        raise DatasetError(f"{source} has {len(names)} classes; 2 to {IGNORED - 1} are accepted")


def _levels(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The different values of a mask, ascending, with the numbers of their pixels."""
    if raw.dtype.itemsize > 1:
        return np.unique(raw, return_counts=True)
    counts = sum(np.bincount(row, minlength=IGNORED + 1) for row in raw.view(np.uint8))
    (levels,) = counts.nonzero()
    return levels, counts[levels]


def _from_table(lines: Sequence[str], file: Path) -> list[str]:
    header, *rows = ([cell.strip() for cell in line.split("\t")] for line in lines)
    columns = [name.lower() for name in header]
    if "name" not in columns:
        raise DatasetError(f'{file}: no column "Name" among {", ".join(header)}')
    for number, row in enumerate(rows, start=1):
        if len(row) != len(header):
            raise DatasetError(
                f"{file}: line {number + 1} has {len(row)} columns; the header has {len(header)}"
            )
        if "idx" in columns and row[columns.index("idx")] != str(number):
            raise DatasetError(
                f"{file}: line {number + 1} has the Idx {row[columns.index('idx')]}; {number} is"
                " next"
            )
    return [row[columns.index("name")] for row in rows]


def _by_name(folder: Path, suffix: str | None = None) -> dict[str, Path]:
    """The images below a folder by their relative path without suffix, those of `suffix` alone."""
    if not folder.exists():
        raise FileNotFoundError(2, "No such folder", str(folder))
    if not folder.is_dir():
        raise DatasetError(f"{folder} is a file; a folder is needed")
    found: dict[str, Path] = {}
    for path in map(Path, images_below(str(folder))):
        if suffix is not None and path.suffix.lower() != suffix:
            continue
        name = str(path.relative_to(folder).with_suffix(""))
        if name in found:
            raise DatasetError(f"{found[name]} and {path} differ by their suffix alone")
        found[name] = path
    if not found:
        accepted = suffix or ", ".join(IMAGE_SUFFIXES)
        raise DatasetError(f"{folder} has no image (accepted: {accepted})")
    return found
