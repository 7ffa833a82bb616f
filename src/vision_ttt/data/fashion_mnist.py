"""Fashion-MNIST: 70,000 photographs of clothes, 28 × 28 grey pixels, ten classes, official split.

H. Xiao, K. Rasul, R. Vollgraf, "Fashion-MNIST: a novel image dataset for benchmarking machine
learning algorithms", 2017.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image
from torch.utils.data import Dataset

from vision_ttt.data.shards import DatasetError

INSTALLED = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts the files."""
_FILES = {"train": "train", "test": "t10k"}
_MOST_ITEMS = 1_000_000


class FashionMNIST(Dataset[tuple[Image.Image, int]]):
    """Fashion-MNIST as RGB images with labels 0 to 9; 60,000 for training, 10,000 for test.

    Args:
        split: "train" or "test".
        root: folder of the IDX files, compressed or not, or a root of torchvision's
            ``FashionMNIST``; None: the folder of Debian's package.

    Raises:
        FileNotFoundError: a file is missing; names both ways to get it.
        DatasetError: a file is damaged, or images and labels differ in number.
    """

    classes: tuple[str, ...] = (
        *("T-shirt", "trouser", "pullover", "dress", "coat"),
        *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
    )

    def __init__(self, split: Literal["train", "test"], root: str | None = None) -> None:
        if split not in _FILES:
            raise ValueError(f"split is {split!r}; Fashion-MNIST has 'train' and 'test'")
        images = _find(f"{_FILES[split]}-images-idx3-ubyte", root)
        labels = _find(f"{_FILES[split]}-labels-idx1-ubyte", root)
        self.images = _read_idx(images, ndim=3)
        self.targets = _read_idx(labels, ndim=1).tolist()
        if len(self.images) != len(self.targets):
            raise DatasetError(
                f"{images} has {len(self.images)} images, {labels} {len(self.targets)} labels"
            )
        if max(self.targets) >= len(self.classes):
            raise DatasetError(f"{labels} has label {max(self.targets)}; accepted are 0 to 9")

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.images[index]).convert("RGB"), self.targets[index]


def _find(name: str, root: str | None) -> Path:
    folder = INSTALLED if root is None else Path(root).expanduser()
    places = (folder, folder / "FashionMNIST" / "raw")
    for path in (place / file for place in places for file in (name, f"{name}.gz")):
        if path.is_file():
            return path
    raise FileNotFoundError(
        2,
        f"{name} of Fashion-MNIST is not there; install Debian's package dataset-fashion-mnist, or"
        " call torchvision.datasets.FashionMNIST(FOLDER, download=True) once and give FOLDER as"
        " dataset_root",
        str(folder),
    )


def _read_idx(path: Path, ndim: int) -> np.ndarray:
    """Read bytes in the IDX format: 0, 0, 8 (unsigned bytes), the number of axes, their sizes."""
    header = 4 + 4 * ndim
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            start = file.read(header)
            magic, *shape = struct.unpack(f">{1 + ndim}I", start)
            if magic != 0x800 + ndim or not 0 < shape[0] <= _MOST_ITEMS:
                raise ValueError("its header is not a valid IDX header of images or labels")
            if shape[1:] not in ([], [28, 28]):
                raise ValueError(f"its images have {shape[1:]} pixels, not [28, 28]")
            size = int(np.prod(shape))
            content = file.read(size + 1)
            if len(content) != size:
                raise ValueError(f"it must have exactly {size} bytes after the header")
    except (ValueError, OSError, EOFError, struct.error, zlib.error) as error:
        raise DatasetError(f"{path} is no file of Fashion-MNIST: {error}") from error
    return np.frombuffer(content, np.uint8).reshape(shape)
