"""Pictures of letters as a dataset, rendered when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset

from studies.letters.fonts import Split
from studies.letters.images import LetterPicture, LetterSettings, render_letters
from studies.root_options import read_root_options
from vision_ttt.data.mask_folders import LabelledImage
from vision_ttt.data.shards import DatasetError
from vision_ttt.tasks.segmentation import LabelledSet

BACKGROUND_NAME = "background"
"""Class of the pixels of no letter that counts."""

_TEST_IMAGES: dict[Split, int] = {"validation": 32, "test": 64}


@dataclass(frozen=True)
class LetterImages(Dataset[LabelledImage]):
    """The pictures of a split with their pixels' labels: 0 is the background, k + 1 class k.

    Each is rendered when it is read, which takes 15 ms at 256² pixels, in as many worker processes
    as the loader has.
    """

    settings: LetterSettings
    split: Split
    images: int

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the labels."""
        return (BACKGROUND_NAME, *self.settings.names)

    def __len__(self) -> int:
        return self.images

    def picture(self, index: int) -> LetterPicture:
        """Picture `index` with all that is on it."""
        return render_letters(self.settings, self.split, index)

    def __getitem__(self, index: int) -> LabelledImage:
        if not 0 <= index < self.images:
            raise IndexError(f"picture {index} of {self.images}")
        picture = self.picture(index)
        return LabelledImage(picture.image, picture.labels())


def open_letters(options: Mapping[str, Any]) -> LabelledSet:
    """The pictures to train with and to test with.

    Args:
        options: fields of :class:`LetterSettings`; `train_images` (100,000) and `test_images` (64
            of the split "test", 32 of "validation"); `test_split`, "test" or "validation": letters
            of other fonts.

    Raises:
        DatasetError: an option is unknown or its value is not accepted.
    """
    test_split = options.get("test_split", "test")
    if test_split not in tuple(_TEST_IMAGES):
        raise DatasetError(f"test_split is {test_split!r}; accepted: {', '.join(_TEST_IMAGES)}")
    settings, train_images, test_images = read_root_options(
        "letters",
        options,
        LetterSettings,
        test_images=_TEST_IMAGES[test_split],
        others=("test_split",),
    )
    train = LetterImages(settings, "train", train_images)
    return LabelledSet(train.classes, train, LetterImages(settings, test_split, test_images))
