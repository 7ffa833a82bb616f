"""The section `data` of tasks on images: where they come from, their size, their augmentation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vision_ttt.engine.section import (
    COUNT,
    FRACTION,
    INNER_FRACTION,
    NOT_NEGATIVE,
    PROBABILITY,
    ConfigError,
    Range,
    Section,
    number,
)

if TYPE_CHECKING:
    from vision_ttt.engine.config import TrainConfig


@dataclass(frozen=True)
class ImageData(Section):
    """A dataset of labelled images, and what is done to its images."""

    dataset: str = "digits"
    """"digits" (scikit-learn's), "fashion-mnist" (of Debian's package dataset-fashion-mnist or in
    dataset_root), "elpv" or "elpv-grades" (of the package elpv-dataset or in dataset_root), an
    image folder (with train/ and val/ or test/, or one folder per class), a folder of webdataset
    shards (*.tar), or a name that timm.data.create_dataset reads, such as hfds/NAME or wds/NAME."""
    dataset_root: str | None = None
    """Folder of fashion-mnist, elpv, or a dataset that timm reads by name."""
    train_split: str = "train"
    """Name of the training split, for datasets read by timm."""
    test_split: str = "validation"
    """Name of the test split, for datasets read by timm."""
    test_fraction: float = number(0.2, INNER_FRACTION)
    """Fraction of images held out for test (0 to 1, exclusive) if elpv or a folder has no test
    split; the choice is stratified and does not depend on run.seed."""
    split_seed: int = number(0, Range(0, 2**32 - 1, "from 0 to 4,294,967,295"))
    """Seed of that choice, and of train_fraction's."""
    train_fraction: float = number(1.0, FRACTION)
    """Fraction of the training images that is used, the same of each class and at least one image
    (>0 to 1); the choice depends on split_seed alone. Below 1, streamed datasets and those of
    hfds/ and torch/ are not supported."""
    num_classes: int | None = number(None, Range(2, float("inf"), "at least 2"))
    """Number of classes, for datasets that do not state it; null: that of the dataset. It must not
    differ from the dataset's."""
    image_size: int | None = number(None, Range(1, 16_384, "from 1 to 16,384"))
    """Height and width of the model's input in pixels; null: the model's default."""
    naflex: int | None = number(None, Range(1, 65_536, "from 1 to 65,536"))
    """Largest number of patches of an image. Images keep their proportions and are resized to about
    this number; a batch has at most batch_size times as many. null: all images are squares of
    image_size."""
    crop_scale: float = number(0.08, FRACTION)
    """Smallest area of the random resized crop, as a fraction of the image (>0 to 1)."""
    crop_ratio: float = number(1.3333, Range(1.0, float("inf"), "at least 1"))
    """Largest aspect ratio of the random resized crop, its inverse being the smallest (>= 1)."""
    crop_fraction: float | None = number(None, Range(0.1, 1.0, "from 0.1 to 1"))
    """Side of the centre crop at test, as a fraction of the resized image's (0.1 to 1); null: the
    model's own. With naflex it must be null or 1."""
    horizontal_flip: float = number(0.5, PROBABILITY)
    """Probability of a left-right flip (0 to 1)."""
    color_jitter: float = number(0.0, NOT_NEGATIVE)
    """Strength of brightness, contrast and saturation jitter (>= 0); must be 0 with RandAugment,
    AutoAugment and AugMix, which vary colours themselves."""
    auto_augment: str | None = None
    """Policy in timm's words: RandAugment, e.g. rand-m9-mstd0.5-inc1, AutoAugment, e.g. v0, AugMix,
    e.g. augmix-m5-w4-d2, or ThreeAugment, 3a; null: none."""
    repeated_augmentation: int = number(1, COUNT)
    """Number of differently augmented copies of each drawn image; the number of images per epoch
    does not change, so that an epoch has fewer different images."""
    random_erasing: float = number(0.0, PROBABILITY)
    """Probability of overwriting a random rectangle with noise (0 to 1)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.color_jitter and self.auto_augment and "3a" not in self.auto_augment:
            raise ConfigError(
                f"color_jitter is {self.color_jitter}; beside auto_augment {self.auto_augment!r},"
                " which varies colours itself, it must be 0"
            )


def check_images(config: TrainConfig) -> None:
    """Raise ConfigError if an image is to be seen more often than a batch has images.

    If images keep their proportions, also raise it if the task's section does not declare that it
    accepts such images (``KEEPS_PROPORTIONS``), the model is compiled, or images are to be cropped
    at test.
    """
    repeats, batch_size = config.data.repeated_augmentation, config.optimisation.batch_size
    if repeats > batch_size:
        raise ConfigError(
            f"repeated_augmentation is {repeats}; it must be at most batch_size ({batch_size})"
        )
    naflex = config.data.naflex
    if naflex and not getattr(config.task, "KEEPS_PROPORTIONS", False):
        raise ConfigError(
            f"naflex is {naflex}; it must be null, as the task {config.task.name} takes images of"
            " one size"
        )
    if naflex and config.machine.compile:
        raise ConfigError(
            "compile is true; it must be false with naflex: images of other proportions would be"
            " compiled anew in each batch"
        )
    if naflex and config.data.crop_fraction not in (None, 1.0):
        raise ConfigError(
            f"crop_fraction is {config.data.crop_fraction}; it must be null or 1 with naflex, which"
            " shows all of an image at test"
        )
