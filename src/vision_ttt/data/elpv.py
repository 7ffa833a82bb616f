"""ELPV: 2,624 electroluminescence photographs of solar cells, by their probability of a defect.

S. Deitsch et al., "Segmentation of photovoltaic module cells in uncalibrated electroluminescence
images", 2021. The images are licensed CC BY-NC-SA 4.0.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from PIL import Image
from torch.utils.data import Dataset

from vision_ttt.data.images import open_listed
from vision_ttt.data.shards import DatasetError, read_lines


class ELPV(Dataset[tuple[Image.Image, int]]):
    """Solar cells as 300 × 300 RGB images, with the defect probability that experts gave them.

    There are two classes, functional and defective (a probability of at least one half), or four:
    the probabilities 0, 1/3, 2/3 and 1. The mean of these four, weighted by a classifier's
    probabilities, is its estimate of a cell's defect probability.

    Args:
        root: folder with ``labels.csv`` and ``images``; None: that of the installed package
            elpv-dataset.
        grades: whether the four probabilities are the classes.

    Raises:
        FileNotFoundError: there is no such folder; says how to get it.
        DatasetError: a line of the labels cannot be read.
    """

    def __init__(self, root: str | None = None, *, grades: bool = False) -> None:
        self.classes = ("0", "1/3", "2/3", "1") if grades else ("functional", "defective")
        folder = _installed() if root is None else Path(root).expanduser()
        labels = folder / "labels.csv"
        if not labels.is_file():
            raise FileNotFoundError(
                2,
                "ELPV is not there; pip install elpv-dataset, or give the folder of its labels.csv"
                " as dataset_root",
                str(labels),
            )
        self.samples: list[tuple[str, int]] = []
        self.kinds: list[str] = []
        """Of each image: whether it is defective, and the kind of its module, mono- or
        polycrystalline."""
        for number, line in enumerate(read_lines(labels), 1):
            try:
                name, text, kind = line.split()
                probability = float(text)
                if not 0 <= probability <= 1:
                    raise ValueError(f"the defect probability is {text}; it must be from 0 to 1")
                if Path(name).is_absolute() or ".." in Path(name).parts:
                    raise ValueError("the image is not in the folder")
            except ValueError as error:
                raise DatasetError(f"{labels}, line {number}: {error}") from error
            is_defective = int(probability >= 0.5)
            label = round(3 * probability) if grades else is_defective
            self.samples.append((str(folder / name), label))
            self.kinds.append(f"{is_defective} {kind}")
        if not self.samples:
            raise DatasetError(f"{labels} names no image")
        self.targets = [label for _, label in self.samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        path, label = self.samples[index]
        return open_listed(path), label


def _installed() -> Path:
    # The package's code is not run: it only says where its files are.
    found = importlib.util.find_spec("elpv_dataset")
    if found is None or found.origin is None:
        return Path("elpv_dataset")
    return Path(found.origin).parent / "data"
