"""Scikit-learn's handwritten digits: 1797 real 8×8 scans that come with the package."""

from typing import Literal

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import Dataset

TEST_IMAGES = 500


class Digits(Dataset[tuple[Image.Image, int]]):
    """Handwritten digits as 32×32 RGB images with labels 0 to 9.

    The split is fixed and stratified: 500 images are for test, the other 1297 for training.
    """

    classes: tuple[str, ...] = tuple("0123456789")

    def __init__(self, split: Literal["train", "test"]) -> None:
        if split not in ("train", "test"):
            raise ValueError(f"split is {split!r}; digits has 'train' and 'test'")
        scans, labels = load_digits(return_X_y=True)
        train, test = train_test_split(
            np.arange(len(labels)), test_size=TEST_IMAGES, stratify=labels, random_state=0
        )
        chosen = np.sort(train if split == "train" else test)
        # Grey levels are 0 to 16.
        grey = np.rint(scans[chosen].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
        self.images = [
            Image.fromarray(scan).resize((32, 32), Image.Resampling.BICUBIC).convert("RGB")
            for scan in grey
        ]
        self.targets = [int(label) for label in labels[chosen]]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return self.images[index], self.targets[index]
