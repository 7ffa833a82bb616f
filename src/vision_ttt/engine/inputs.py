"""From a run's config to what its loop iterates over."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import torch
from timm.data import Mixup
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from vision_ttt.data import (
    BadImage,
    DatasetError,
    DatasetSpec,
    ImageSplits,
    evaluation_transform,
    train_transform,
    with_transform,
)
from vision_ttt.engine.config import ConfigError, TrainConfig


def dataset_spec(config: TrainConfig) -> DatasetSpec:
    """Return what of the config identifies its dataset."""
    names = (field.name for field in dataclasses.fields(DatasetSpec))
    return DatasetSpec(**{name: getattr(config, name) for name in names})


def transformed(
    data: ImageSplits, model_input: dict[str, Any], config: TrainConfig
) -> tuple[Dataset, Dataset]:
    """Return the training and the test images as tensors, the former augmented.

    Raises:
        ConfigError: timm cannot read `auto_augment`.
    """
    try:
        for_training = train_transform(
            model_input,
            crop_scale=config.crop_scale,
            crop_ratio=config.crop_ratio,
            horizontal_flip=config.horizontal_flip,
            color_jitter=config.color_jitter,
            auto_augment=config.auto_augment,
            random_erasing=config.random_erasing,
        )
    except (AssertionError, ValueError, KeyError) as error:  # timm's, on a policy it cannot read
        raise ConfigError(f"auto_augment is {config.auto_augment!r}: {error}") from error
    return (
        with_transform(data.train, for_training, config.seed, config.num_workers),
        with_transform(
            data.test, evaluation_transform(model_input), config.seed, config.num_workers
        ),
    )


def count_updates(train_set: Dataset, config: TrainConfig) -> int:
    """Return the optimiser updates per epoch; images that do not fill a batch wait for the next.

    Raises:
        ConfigError: there are fewer images than a batch has.
    """
    count = len(train_set)
    if count < config.batch_size:
        raise ConfigError(
            f"batch_size is {config.batch_size}, but {config.dataset} has {count} training images;"
            " it must be at most that"
        )
    return count // config.batch_size


def mixing(config: TrainConfig, num_classes: int) -> Mixup | None:
    """Return what mixes a batch's images and smooths its labels; None with mixup and CutMix off."""
    if not config.mixes_images:
        return None
    return Mixup(
        mixup_alpha=config.mixup,
        cutmix_alpha=config.cutmix,
        label_smoothing=config.label_smoothing,
        num_classes=num_classes,
    )


def spread_images(test_set: Dataset, count: int) -> Tensor:
    """Return up to `count` good test images [N, 3, H, W], evenly spaced: they may lie by class."""
    if isinstance(test_set, IterableDataset):
        items = list(itertools.islice(iter(test_set), count))
    else:
        places = np.linspace(0, len(test_set) - 1, min(count, len(test_set))).astype(int)
        items = [test_set[int(place)] for place in places]
    images = [item[0] for item in items if not isinstance(item, BadImage)]
    if not images:
        raise DatasetError("the test set has no image that decodes")
    return torch.stack(images)
