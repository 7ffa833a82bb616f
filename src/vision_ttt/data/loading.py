"""From images to batches: transforms, seeded augmentation, order, and the damaged images' names."""

import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import create_transform
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from vision_ttt.data.images import ImageError

Transform = Callable[[Image.Image], Tensor]
Batch = dict[str, Any]
"""images [B, 3, H, W] float32, targets [B] int64, bad: the names and reasons of images left out."""


@dataclass(frozen=True)
class BadImage:
    """Stands for an image that did not decode, on its way from the worker to the loop."""

    name: str
    reason: str


class TransformedImages(Dataset):
    """Images as tensors [3, H, W] with class indices; one that does not decode is a `BadImage`.

    The augmentation of an image depends on (seed, epoch, index) and nothing else: not on the number
    of worker processes, not on the images before it. Set `epoch` before each epoch.
    """

    def __init__(self, images: Dataset, transform: Transform, seed: int = 0) -> None:
        self.images = images
        self.transform = transform
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int] | BadImage:
        try:
            image, target = self.images[index]
        except ImageError as error:
            return BadImage(error.name, error.reason)
        with isolated_seed(self.seed, self.epoch, index):
            return self.transform(image), target


class StreamedImages(IterableDataset):
    """The same for datasets that can only be read in order (timm's wds/, tfds/, hfids/)."""

    def __init__(self, images: IterableDataset, transform: Transform, num_workers: int) -> None:
        self.images = images
        self.transform = transform
        self.epoch = 0
        self.images.set_loader_cfg(num_workers=num_workers)

    def __len__(self) -> int:
        return len(self.images)

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        self.images.set_epoch(self.epoch)
        for image, target in self.images:
            yield self.transform(image), target


def with_transform(
    images: Dataset, transform: Transform, seed: int, num_workers: int = 0
) -> TransformedImages | StreamedImages:
    """Return `images` as tensors by `transform`, whether they are random-access or streamed."""
    if isinstance(images, IterableDataset):
        return StreamedImages(images, transform, num_workers)
    return TransformedImages(images, transform, seed)


class EpochOrder(Sampler[int]):
    """A seeded random order of `length` indices per epoch, cut to `taken` and begun anywhere."""

    def __init__(self, length: int, taken: int, seed: int) -> None:
        self.length = length
        self.taken = taken
        self.seed = seed
        self.epoch = 0
        self.skipped = 0

    # Not called set_epoch: accelerate would call that with a count of its own.
    def begin(self, epoch: int, skipped: int = 0) -> None:
        """Set the epoch that the next iteration orders, and how many of its indices to skip."""
        self.epoch = epoch
        self.skipped = skipped

    def __len__(self) -> int:
        return self.taken - self.skipped

    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng((self.seed, self.epoch)).permutation(self.length)
        return iter(order[self.skipped : self.taken].tolist())


def collate(items: Sequence[tuple[Tensor, int] | BadImage]) -> Batch:
    """Stack the good images and list the bad ones."""
    bad = [item for item in items if isinstance(item, BadImage)]
    good = [item for item in items if not isinstance(item, BadImage)]
    return {
        "images": torch.stack([image for image, _ in good]) if good else torch.empty(0, 3, 1, 1),
        "targets": torch.tensor([target for _, target in good], dtype=torch.int64),
        "bad": [(item.name, item.reason) for item in bad],
    }


def make_loader(
    dataset: Dataset,
    batch_size: int,
    *,
    num_workers: int = 0,
    order: EpochOrder | None = None,
    seed: int = 0,
) -> DataLoader:
    """Return a loader of `Batch`es, in the dataset's own order where `order` is None."""
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=order,
        num_workers=num_workers,
        collate_fn=collate,
        # Without one, each new iterator would draw from the global generator.
        generator=torch.Generator().manual_seed(seed),
        worker_init_fn=_ignore_interrupts if num_workers else None,
        pin_memory=torch.cuda.is_available(),
    )


def train_transform(
    data_config: dict[str, Any],
    *,
    crop_scale: float = 0.08,
    crop_ratio: float = 4 / 3,
    horizontal_flip: float = 0.5,
    color_jitter: float = 0.0,
    auto_augment: str | None = None,
    random_erasing: float = 0.0,
) -> Transform:
    """Return timm's training transform for a timm data config; arguments as in `TrainConfig`."""

    return create_transform(
        input_size=data_config["input_size"],
        is_training=True,
        interpolation=data_config["interpolation"],
        mean=data_config["mean"],
        std=data_config["std"],
        scale=(crop_scale, 1.0),
        ratio=(1 / crop_ratio, crop_ratio),
        hflip=horizontal_flip,
        color_jitter=color_jitter or None,
        auto_augment=auto_augment,
        re_prob=random_erasing,
        re_mode="pixel",
    )


def evaluation_transform(data_config: dict[str, Any]) -> Transform:
    """Return timm's evaluation transform for a timm data config."""

    return create_transform(
        input_size=data_config["input_size"],
        interpolation=data_config["interpolation"],
        mean=data_config["mean"],
        std=data_config["std"],
        crop_pct=data_config["crop_pct"],
        crop_mode=data_config["crop_mode"],
    )


@contextmanager
def isolated_seed(*key: int) -> Iterator[None]:
    """Seed Python's, NumPy's and torch's CPU generators by `key`, and restore them afterwards."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed = int(np.random.SeedSequence(key).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _ignore_interrupts(_worker: int) -> None:
    # Ctrl-C reaches the whole process group; the main process decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
