"""From a dataset's name to its images: the digits, a folder, shards, or whatever timm reads."""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import timm.data
from PIL import Image
from sklearn.model_selection import train_test_split
from timm.data.dataset import ImageDataset, IterableImageDataset
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset
from torchvision.datasets import ImageFolder

from vision_ttt.data.digits import Digits
from vision_ttt.data.elpv import ELPV
from vision_ttt.data.fashion_mnist import FashionMNIST
from vision_ttt.data.image_files import images_below
from vision_ttt.data.images import ImageError, open_image, open_listed
from vision_ttt.data.shards import CLASSES_FILE, DatasetError, ShardImages, read_lines
from vision_ttt.errors import reason_of
from vision_ttt.file_kinds import IMAGE_SUFFIXES, is_hidden, is_text

_TEST_FOLDERS = ("val", "validation", "test")
_PARTS = {"train", "training", "valid", "testing", *_TEST_FOLDERS}
"""Names of a dataset's parts, which are no classes."""
_SPLIT_NAMES = ("train_split", "test_split")
DRAWN = ("test_fraction", "split_seed")
ACCEPTED = (
    "'digits', 'fashion-mnist', 'elpv', 'elpv-grades', an image folder, a folder of *.tar shards,"
    " or a name timm.data.create_dataset reads such as hfds/NAME"
)


@dataclass(frozen=True)
class DatasetSpec:
    """What identifies a dataset and its split.

    Fields as in :class:`vision_ttt.tasks.images.config.ImageData`.
    """

    dataset: str
    dataset_root: str | None = None
    train_split: str = "train"
    test_split: str = "validation"
    test_fraction: float = 0.2
    split_seed: int = 0
    train_fraction: float = 1.0
    num_classes: int | None = None


class UndividedError(DatasetError):
    """There are too few images to draw the test images by `test_fraction`."""


@dataclass(frozen=True)
class ImageSplits:
    """A dataset's two parts, whose items are (RGB PIL image, class index), and its class names."""

    train: Dataset
    test: Dataset
    classes: tuple[str, ...]
    held_out: str | None = None
    """Digest of the test images' names, if they were drawn from all images: files that are added or
    removed change the draw. None: the data come in two parts."""

    def part(self, name: str) -> Dataset:
        """Return the part "train", "test" or "all"."""
        if name == "all":
            if isinstance(self.train, IterableDataset):
                raise DatasetError("a streamed dataset has no part 'all'; take 'train' or 'test'")
            return ConcatDataset([self.train, self.test])
        if name not in ("train", "test"):
            raise ValueError(f"part is {name!r}; it must be train, test or all")
        return self.train if name == "train" else self.test


def open_dataset(spec: DatasetSpec) -> ImageSplits:
    """Open the dataset that `spec` names.

    Raises:
        DatasetError: an empty class folder, class folders that differ between the splits, no test
            split, no class names, a name that timm cannot read, a field that would be ignored, or
            a fraction of training images whose classes are not known before they are read.
        FileNotFoundError: a folder that is not there.
    """
    splits = _open(spec)
    if spec.train_fraction == 1:
        return splits
    return replace(splits, train=_fraction(splits.train, spec))


def targets_of(images: Dataset) -> np.ndarray | None:
    """Return the class of each image; None where only reading the images tells it."""
    if isinstance(images, Subset):
        targets = targets_of(images.dataset)
        return None if targets is None else targets[images.indices]
    targets = getattr(images, "targets", None)
    return None if targets is None else np.asarray(targets)


def _fraction(images: Dataset, spec: DatasetSpec) -> Subset:
    """Draw a fraction of each class; a smaller fraction is a part of a larger one."""
    own = targets_of(images)
    if own is None:
        raise DatasetError(
            f"train_fraction is {spec.train_fraction}; it must be 1 for {spec.dataset}, whose"
            " classes are known only when its images are read"
        )
    drawn: list[int] = []
    for each in np.unique(own).tolist():
        order = np.random.default_rng((spec.split_seed, each)).permutation(
            np.nonzero(own == each)[0]
        )
        drawn += order[: max(1, round(spec.train_fraction * len(order)))].tolist()
    return Subset(images, sorted(drawn))


def _open(spec: DatasetSpec) -> ImageSplits:
    if spec.dataset == "digits":
        _refuse_fields(spec, "the digits", "dataset_root", *_SPLIT_NAMES, *DRAWN)
        return ImageSplits(Digits("train"), Digits("test"), Digits.classes)
    if spec.dataset == "fashion-mnist":
        _refuse_fields(spec, "Fashion-MNIST", *_SPLIT_NAMES, *DRAWN)
        train, test = (FashionMNIST(split, spec.dataset_root) for split in ("train", "test"))
        return ImageSplits(train, test, FashionMNIST.classes)
    if spec.dataset in ("elpv", "elpv-grades"):
        _refuse_fields(spec, "ELPV", *_SPLIT_NAMES)
        cells = ELPV(spec.dataset_root, grades=spec.dataset == "elpv-grades")
        names = [Path(path).name for path, _ in cells.samples]
        return _split(cells, names, cells.kinds, cells.classes, "ELPV", spec)
    folder = Path(spec.dataset).expanduser()
    if folder.is_dir():
        _refuse_fields(spec, f"the folder {folder}", "dataset_root", *_SPLIT_NAMES)
        shards = sorted(folder.rglob("*.tar"))
        shards = [path for path in shards if not is_hidden(path.relative_to(folder))]
        return _open_shards(shards, spec) if shards else _open_folder(folder, spec)
    prefix, slash, _ = spec.dataset.partition("/")
    if slash and prefix.lower() in ("hfds", "hfids", "tfds", "wds", "torch"):
        return _open_timm(spec)
    raise FileNotFoundError(2, f"No such dataset; accepted: {ACCEPTED}; got", spec.dataset)


def _refuse_fields(spec: DatasetSpec, place: str, *names: str) -> None:
    """Refuse fields that `place` does not use, if they differ from their defaults.

    `split_seed` is used wherever a fraction of the training images is drawn.

    Raises:
        DatasetError: such a field is set.
    """
    for name in names:
        value = getattr(spec, name)
        drawn = name == "split_seed" and spec.train_fraction < 1
        if value != getattr(DatasetSpec, name) and not drawn:
            raise DatasetError(f"{name} is {value!r}, but {place} has no use for it; leave it out")


class FolderImages(ImageFolder):
    """One folder per class; items are (RGB PIL image, class index), classes in sorted order.

    Raises:
        DatasetError: no class folder, one without images (it is named), or links without an end.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(str(root), loader=open_listed)

    @staticmethod
    def make_dataset(
        directory: str, class_to_idx: dict[str, int], *_: Any, **_by_name: Any
    ) -> list[tuple[str, int]]:
        """List the images of the classes; torchvision's own would follow links for ever."""
        samples: list[tuple[str, int]] = []
        for name, index in class_to_idx.items():
            images = images_below(os.path.join(directory, name))
            if not images:
                raise DatasetError(
                    f"image folder {directory}: class folder {name} has no images (accepted:"
                    f" {', '.join(IMAGE_SUFFIXES)})"
                )
            samples += [(path, index) for path in images]
        return samples

    def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
        """Find the class folders; hidden ones (such as .git) are none."""
        names = sorted(
            entry.name
            for entry in Path(directory).iterdir()
            if entry.is_dir() and not entry.name.startswith(".")
        )
        if not names:
            raise DatasetError(
                f"image folder {directory} has no class folders (one per class needed)"
            )
        if len(names) == 1:
            raise DatasetError(
                f"image folder {directory} has one class folder, {names[0]}; at least 2 are needed"
            )
        for name in names:
            if not is_text(name):
                raise DatasetError(
                    f"image folder {directory}: the class folder {name!r} has a name that is no"
                    " text in UTF-8; rename it"
                )
        return names, {name: index for index, name in enumerate(names)}


def _open_folder(root: Path, spec: DatasetSpec) -> ImageSplits:
    test_root = next((root / name for name in _TEST_FOLDERS if (root / name).is_dir()), None)
    if (root / "train").is_dir():
        if test_root is None:
            raise DatasetError(
                f"image folder {root} has train/ but none of {', '.join(_TEST_FOLDERS)} beside it"
            )
        _refuse_fields(spec, f"{root}, which has {test_root.name}/,", *DRAWN)
        train, test = FolderImages(root / "train"), FolderImages(test_root)
        if train.classes != test.classes:
            alone = sorted(set(train.classes) ^ set(test.classes))
            raise DatasetError(
                f"the class folders of {root / 'train'} and {test_root} differ: {', '.join(alone)}"
                " are in only one of them"
            )
        return ImageSplits(train, test, tuple(train.classes))
    images = FolderImages(root)
    if all(name.lower() in _PARTS for name in images.classes):
        raise DatasetError(
            f"the folders of {root} are {', '.join(images.classes)}, which are the names of a"
            " dataset's parts, not of classes; name them train and one of"
            f" {', '.join(_TEST_FOLDERS)}"
        )
    names = [path.removeprefix(str(root)) for path, _ in images.samples]
    return _split(images, names, images.targets, tuple(images.classes), root, spec)


def _open_shards(shards: list[Path], spec: DatasetSpec) -> ImageSplits:
    root = Path(spec.dataset).expanduser()
    test = [path for path in shards if _is_for_test(path.relative_to(root))]
    train = [path for path in shards if path not in test]
    if not train:
        raise DatasetError(f"all shards in {root} are for test, by their names")
    images = ShardImages(train)
    test_images = ShardImages(test) if test else None
    labels = {*images.targets, *(test_images.targets if test_images else ())}
    classes = _shard_classes(root, labels, spec.num_classes)
    if test_images is None:
        names = [f"{each.shard.relative_to(root)}/{each.name}" for each in images.samples]
        return _split(images, names, images.targets, classes, root, spec)
    _refuse_fields(spec, f"{root}, which has shards for test,", *DRAWN)
    return ImageSplits(images, test_images, classes)


def _is_for_test(path: Path) -> bool:
    """Whether a folder or a word of the name says so: val/0.tar, imagenet-validation-00.tar."""
    words = re.split(r"[^a-z]+", str(path.with_suffix("")).lower())
    return any(name in words for name in _TEST_FOLDERS)


def _shard_classes(root: Path, labels: set[int], num_classes: int | None) -> tuple[str, ...]:
    path = root / CLASSES_FILE
    if os.path.lexists(path):
        names = read_lines(path)
    else:
        names = [str(index) for index in range(num_classes or max(labels) + 1)]
    if min(labels) < 0 or max(labels) >= len(names):
        raise DatasetError(
            f"the shards in {root} have class indices from {min(labels)} to {max(labels)}, but"
            f" there are {len(names)} classes"
        )
    if len(names) < 2:
        raise DatasetError(f"the shards in {root} have one class; at least 2 are needed")
    return tuple(names)


def _split(
    images: FolderImages | ShardImages | ELPV,
    names: Sequence[str],
    strata: Sequence[Hashable],
    classes: tuple[str, ...],
    root: Path | str,
    spec: DatasetSpec,
) -> ImageSplits:
    """Draw the test images, the same share of each stratum."""
    rarest, count = min(Counter(images.targets).items(), key=lambda item: item[1])
    if count < 2:
        raise DatasetError(
            f"class {classes[rarest]} of {root} has {count} image; at least 2 are needed to split"
            " it into training and test images"
        )
    try:
        # The split must not follow the run's seed: `eval` must use the same test images.
        train_indices, test_indices = train_test_split(
            np.arange(len(images)),
            test_size=spec.test_fraction,
            stratify=strata,
            random_state=spec.split_seed,
        )
    except ValueError as error:
        raise UndividedError(
            f"{root} has {len(images)} images in {len(classes)} classes, which test_fraction"
            f" {spec.test_fraction} cannot split: {error}; choose another fraction, or divide an"
            " image folder into train/ and val/"
        ) from error
    for_test = np.sort(test_indices).tolist()
    test_names = "\n".join(names[index] for index in for_test)
    return ImageSplits(
        Subset(images, np.sort(train_indices).tolist()),
        Subset(images, for_test),
        classes,
        held_out=hashlib.sha256(test_names.encode("utf-8", "surrogateescape")).hexdigest(),
    )


class TimmImages(Dataset[tuple[Image.Image, int]]):
    """A random-access dataset of timm's or torchvision's, with errors that name the image.

    timm's images are opened by us: timm itself would put another one in a damaged one's place.
    """

    def __init__(self, dataset: Dataset, name: str) -> None:
        self.dataset = dataset
        self.name = name

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        name = f"{index} of {self.name}"
        if isinstance(self.dataset, ImageDataset):
            file, target, *_ = self.dataset.reader[index]
            return open_image(file, name), int(target)
        try:
            image, target = self.dataset[index]
        except OSError as error:
            raise ImageError(name, str(error)) from error
        return image.convert("RGB"), int(target)


def _open_timm(spec: DatasetSpec) -> ImageSplits:
    _refuse_fields(spec, f"{spec.dataset}, whose splits have names,", *DRAWN)
    # A checkpoint of others names its data, too.
    if urlsplit(spec.dataset_root or "").scheme == "pipe":
        raise DatasetError(
            f"dataset_root is {spec.dataset_root!r}, a command; a folder or an address is accepted"
        )
    train = _timm_part(spec, spec.train_split, is_training=True)
    test = _timm_part(spec, spec.test_split, is_training=False)
    return ImageSplits(train, test, _timm_classes(train, spec))


def _timm_part(spec: DatasetSpec, split: str, *, is_training: bool) -> Dataset:
    try:
        dataset = timm.data.create_dataset(
            spec.dataset,
            root=None if spec.dataset_root is None else os.path.expanduser(spec.dataset_root),
            split=split,
            is_training=is_training,
            trust_remote_code=False,
        )
    # timm asserts where a name is unknown or a reader's package is missing, and its readers raise
    # anything: whatever it is, the message names the dataset.
    except Exception as error:
        reason = reason_of(error)
        raise DatasetError(f"timm cannot open {spec.dataset} (split {split}): {reason}") from error
    if isinstance(dataset, IterableImageDataset):
        return dataset
    return TimmImages(dataset, spec.dataset)


def _timm_classes(dataset: Dataset, spec: DatasetSpec) -> tuple[str, ...]:
    inner = getattr(dataset, "dataset", dataset)
    known: Sequence[str] | None = getattr(inner, "classes", None)
    mapping = getattr(getattr(inner, "reader", None), "class_to_idx", None)
    if known is None and mapping:
        known = sorted(mapping, key=mapping.__getitem__)
    if known is None and spec.num_classes:
        known = [str(index) for index in range(spec.num_classes)]
    if known is None:
        raise DatasetError(f"dataset {spec.dataset} does not name its classes; give num_classes")
    return tuple(str(name) for name in known)
