"""Pictures of cut-outs as a dataset, made when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset

from studies.root_options import read_root_options
from studies.stamps.cutouts import CLASSES
from studies.stamps.images import StampPictures, StampSettings
from vision_ttt.data.mask_folders import LabelledImage
from vision_ttt.data.shards import DatasetError
from vision_ttt.tasks.segmentation import LabelledSet

CLASS_NAMES = ("background", *CLASSES)
"""Of the labels, from 0; the background is the photograph."""


@dataclass(frozen=True)
class StampImages(Dataset[LabelledImage]):
    """A number of pictures of a split with their pixels' labels."""

    pictures: StampPictures
    images: int

    def __len__(self) -> int:
        return self.images

    def __getitem__(self, index: int) -> LabelledImage:
        if not 0 <= index < self.images:
            raise IndexError(f"picture {index} of {self.images}")
        return self.pictures.render(index)


def open_stamps(options: Mapping[str, Any]) -> LabelledSet:
    """The pictures to train with and to test with.

    Args:
        options: fields of :class:`StampSettings`; `train_images` (100,000) and `test_images` (64).

    Raises:
        DatasetError: an option is unknown or its value is not accepted, or the files of cut-outs or
            photographs are missing; says how to get them.
    """
    settings, train_images, test_images = read_root_options(
        "stamps", options, StampSettings, test_images=64
    )
    try:
        train, test = (StampPictures(settings, split) for split in ("train", "test"))
    except FileNotFoundError as error:
        raise DatasetError(f"{error.filename}: {error.strerror}") from error
    return LabelledSet(
        CLASS_NAMES, StampImages(train, train_images), StampImages(test, test_images)
    )
