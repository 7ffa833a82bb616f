"""From a run's config to what its loop iterates over."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from timm.data import Mixup
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from vision_ttt.data import (
    BadImage,
    DatasetError,
    DatasetSpec,
    EpochOrder,
    EvenOrder,
    ImageSplits,
    Share,
    evaluation_transform,
    make_loader,
    train_transform,
    watched,
    with_transform,
)
from vision_ttt.data.loading import Batch
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


@dataclass(frozen=True)
class Loaders:
    """This process's part of the training and the test images."""

    train: DataLoader
    test: DataLoader
    order: EpochOrder | None
    """Of the training images; None where they are streamed."""
    updates_per_epoch: int
    config: TrainConfig

    def updates(self, epoch: int, done: int) -> Iterator[list[Batch]]:
        """Yield the micro-batches of an epoch's updates, but for the first `done` of them."""
        parts = self.config.accumulation_steps
        self.train.dataset.epoch = epoch
        # Streaming readers seed their workers by it: an epoch must not depend on those before.
        self.train.generator.manual_seed(self.config.seed + epoch)
        if self.order is not None:
            self.order.begin(epoch, skipped=done * parts)
            batches = watched(self.train)
        else:
            total = self.updates_per_epoch * parts
            batches = itertools.islice(watched(self.train), done * parts, total)
        while update := list(itertools.islice(batches, parts)):
            yield update


def make_loaders(
    train_set: Dataset,
    test_set: Dataset,
    config: TrainConfig,
    *,
    share: Share,
    image_shape: Sequence[int],
) -> Loaders:
    """Return the loaders of one process of a run.

    Raises:
        ConfigError: too few images for a batch; streamed images and several processes.
    """
    updates = count_updates(train_set, config)
    if share.count > 1 and isinstance(train_set, IterableDataset):
        raise ConfigError(
            f"dataset {config.dataset} is streamed, which several processes cannot divide exactly;"
            " a folder of webdataset shards (*.tar) or of images they can"
        )
    order = None
    if not isinstance(train_set, IterableDataset):
        order = EpochOrder(
            len(train_set),
            updates * config.accumulation_steps,
            config.micro_batch_size,
            seed=config.seed,
            repeats=config.repeated_augmentation,
            share=share,
        )
    loader = partial(
        make_loader,
        batch_size=config.micro_batch_size // share.count,
        num_workers=config.num_workers,
        timeout=config.loader_timeout,
        image_shape=image_shape,
    )
    return Loaders(
        loader(train_set, order=order, seed=config.seed),
        loader(test_set, order=even_order(test_set, share)),
        order,
        updates,
        config,
    )


def even_order(images: Dataset, share: Share) -> EvenOrder | None:
    """Return the order in which one of several processes evaluates `images`; None if streamed."""
    return None if isinstance(images, IterableDataset) else EvenOrder(len(images), share)


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
