"""From images to batches: transforms, seeded augmentation, and the damaged images' names."""

import multiprocessing
import os
import random
import re
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import create_transform
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from vision_ttt.data.images import ImageError
from vision_ttt.errors import DamagedItem, LoaderError, dead_workers_named

Transform = Callable[[Image.Image], Tensor]
Batch = dict[str, Any]
"""images [B, 3, H, W] float32, targets and indices [B] int64 (the indices are the images' places in
the dataset), damaged: the errors of the images left out."""
_MOST_PROPORTION = 16
"""Longer side of an image over its shorter one; what lies beyond is never in a centre crop."""
Item = tuple[Tensor, int, int] | ImageError
"""An image [3, H, W], its class and its place in the dataset; or why it does not decode."""


class SeededItems(Dataset):
    """Transformed items of a dataset; an item that cannot be read becomes its error.

    The randomness in an item depends only on (seed, epoch, number), and not on the number of
    processes or the items before it. Set `epoch` before each epoch. The number
    `index + k * length` is item `index` with another augmentation (see `EpochOrder`).

    Args:
        items: a dataset; its items are read with `items[index]`, which may raise `DamagedItem`.
        transform: (item, index) → what `collate` gets.
        seed: of what is random in the transform.
    """

    def __init__(self, items: Dataset, transform: Callable[[Any, int], Any], seed: int = 0) -> None:
        self.items = items
        self.transform = transform
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> Any:
        with isolated_generators():
            return self._item(number)

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """The items of a batch; DataLoader asks for them so, which spares isolating each."""
        with isolated_generators():
            return [self._item(number) for number in numbers]

    def _item(self, number: int) -> Any:
        index = number % len(self)
        try:
            item = self.items[index]
            seed_generators(self.seed, self.epoch, number)
            return self.transform(item, index)
        except DamagedItem as error:
            return error


class SharedEpoch(Dataset):
    """A dataset whose attribute `epoch` is shared with the worker processes."""

    def __init__(self, items: Dataset) -> None:
        self.items = items
        self.shared = torch.tensor(getattr(items, "epoch", 0)).share_memory_()

    @property
    def epoch(self) -> int:
        """The epoch of the next items."""
        return int(self.shared)

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.shared.fill_(epoch)
        self.items.epoch = epoch

    def __len__(self) -> int:
        return len(self.items)

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        if hasattr(self.items, "epoch"):
            self.items.epoch = self.epoch
        if hasattr(self.items, "__getitems__"):
            return self.items.__getitems__(numbers)
        return [self.items[number] for number in numbers]


def _transformed(transform: Transform, item: tuple[Image.Image, int], index: int) -> Item:
    image, target = item
    return transform(image), target, index


class StreamedImages(IterableDataset):
    """Transformed images of datasets that are read in order only (timm's wds/, tfds/, hfids/).

    Their order is timm's; the augmentation depends on (seed, epoch, index), an image's index being
    its turn among the worker processes.
    """

    def __init__(
        self, images: IterableDataset, transform: Transform, seed: int, num_workers: int
    ) -> None:
        self.images = images
        self.transform = transform
        self.seed = seed
        self.epoch = 0
        self.images.set_loader_cfg(num_workers=num_workers)

    def __len__(self) -> int:
        return len(self.images)

    def __iter__(self) -> Iterator[Item]:
        self.images.set_epoch(self.epoch)
        reader = self.images.reader
        # timm's webdataset reader draws its order from a generator that it sets up with this; kept,
        # it would make an epoch's order depend on the epochs before.
        if hasattr(reader, "ds"):
            reader.ds = None
            reader.worker_seed = self.seed + self.epoch  # worker processes have their own
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for turn, (image, target) in enumerate(self.images):
            index = first + turn * step
            with isolated_generators():
                seed_generators(self.seed, self.epoch, index)
                image = self.transform(image)
            yield image, target, index


def with_transform(
    images: Dataset, transform: Transform, seed: int, num_workers: int = 0
) -> SeededItems | StreamedImages:
    """Return labelled images by `transform`, whether they are random-access or streamed."""
    if isinstance(images, IterableDataset):
        return StreamedImages(images, transform, seed, num_workers)
    return SeededItems(images, partial(_transformed, transform), seed)


def collate(items: Sequence[Item], image_shape: Sequence[int] = (3, 1, 1)) -> Batch:
    """Stack the good images and list the bad ones; `image_shape` is for batches of bad ones."""
    good, damaged = without_damaged(items)
    images = [image for image, _, _ in good]
    return {
        "images": torch.stack(images) if good else torch.empty(0, *image_shape),
        "targets": torch.tensor([target for _, target, _ in good], dtype=torch.int64),
        "indices": torch.tensor([index for _, _, index in good], dtype=torch.int64),
        "damaged": damaged,
    }


def without_damaged(items: Sequence[Any]) -> tuple[list[Any], list[DamagedItem]]:
    """Return the good ones of some items, and the errors of the others."""
    damaged = [item for item in items if isinstance(item, DamagedItem)]
    return [item for item in items if not isinstance(item, DamagedItem)], damaged


def make_loader(
    dataset: Dataset,
    batch_size: int,
    collate: Callable[[Sequence[Any]], Batch],
    *,
    num_workers: int = 0,
    order: Sampler[int] | None = None,
    seed: int = 0,
    timeout: float = 0.0,
    persistent_workers: bool = False,
) -> DataLoader:
    """Return a loader of batches, in the dataset's own order where `order` is None.

    Args:
        collate: makes a batch of a list of items.
        timeout: seconds to wait for a worker's batch, see `watched`; 0: for ever.
        persistent_workers: keep the worker processes from one pass to the next, until
            `end_workers`; those of a stream, whose order follows from their seeds, end with each.
    """
    persistent = persistent_workers and num_workers > 0 and not isinstance(dataset, IterableDataset)
    if persistent:
        dataset = SharedEpoch(dataset)
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=order,
        num_workers=num_workers,
        collate_fn=collate,
        # Without one, each new iterator would draw from the global generator.
        generator=torch.Generator().manual_seed(seed),
        worker_init_fn=_ignore_stop_requests if num_workers else None,
        timeout=timeout if num_workers else 0.0,
        persistent_workers=persistent,
        pin_memory=torch.cuda.is_available(),
    )


def watched(loader: DataLoader) -> Iterator[Batch]:
    """Go through a loader's batches.

    Raises:
        LoaderError: a worker process was silent for longer than the loader's timeout, or died.
    """
    with dead_workers_named():
        try:
            yield from loader
        except Exception as error:
            # The frames of the loader, which the error refers to, would keep its worker processes.
            traceback.clear_frames(error.__traceback__)
            if isinstance(error, RuntimeError) and "timed out after" in str(error):
                raise LoaderError(
                    f"no worker process delivered a batch within {loader.timeout:g} s: the storage"
                    " may hang, or loader_timeout be too short"
                ) from error
            raise


def end_workers(loader: DataLoader) -> None:
    """End a loader's persistent workers, which otherwise live as long as what refers to it."""
    if loader.persistent_workers and loader._iterator is not None:
        loader._iterator._shutdown_workers()
        loader._iterator = None


def train_transform(
    data_config: dict[str, Any],
    *,
    crop_scale: float = 0.08,
    crop_ratio: float = 4 / 3,
    horizontal_flip: float = 0.5,
    color_jitter: float = 0.0,
    auto_augment: str | None = None,
    random_erasing: float = 0.0,
    **sequences: Any,
) -> Transform:
    """Return timm's training transform for a timm data config; arguments as in
    `vision_ttt.tasks.images.config.ImageData`, and timm's own for sequences of patches.

    Raises:
        ValueError: `auto_augment` is no policy of timm's.
    """
    if auto_augment is not None:
        check_auto_augment(auto_augment)
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
        **sequences,
    )


_NUMBER = r"\d+(\.\d+)?"
_POLICIES = {
    "rand": (
        rf"(m|n|mmax|inc)\d+|(p|mstd){_NUMBER}|t(weights|3a|3aw)",
        "m9, n2, p0.5, mstd0.5, mmax10, inc1, tweights, t3a, t3aw",
    ),
    "augmix": (rf"(m|w|d|b)\d+|(a|mstd){_NUMBER}", "m3, w3, d1, b1, a1, mstd0.5"),
    **dict.fromkeys(("v0", "v0r", "original", "originalr", "3a"), (f"mstd{_NUMBER}", "mstd0.5")),
}
"""timm's policies, and what each of the sections after them, divided by "-", may look like."""


def check_auto_augment(policy: str) -> None:
    """Refuse a policy that timm would read in part only: it skips what it does not know.

    Raises:
        ValueError: it is none; names the section that is not understood, and those that are.
    """
    name, *sections = policy.split("-")
    if name not in _POLICIES:
        raise ValueError(f"unknown policy {name!r}; accepted: {', '.join(_POLICIES)}")
    pattern, examples = _POLICIES[name]
    for section in sections:
        if not re.fullmatch(pattern, section):
            raise ValueError(f"{section!r} is no section of {name}; accepted: such as {examples}")


def evaluation_transform(data_config: dict[str, Any]) -> Transform:
    """Return timm's evaluation transform for a timm data config.

    Where it crops the middle, only the middle of a very long image is resized. timm would resize an
    image of 3 × 20,000 pixels to a length of 1.7 million, and then crop most of it away. Where it
    adds borders, the whole image is shown unless its shorter side would be less than a pixel.
    """
    transform = create_transform(
        input_size=data_config["input_size"],
        interpolation=data_config["interpolation"],
        mean=data_config["mean"],
        std=data_config["std"],
        crop_pct=data_config["crop_pct"],
        crop_mode=data_config["crop_mode"],
    )
    if data_config["crop_mode"] != "squash":  # which shows the whole image
        borders = data_config["crop_mode"] == "border"
        most = min(data_config["input_size"][1:]) if borders else _MOST_PROPORTION
        transform.transforms.insert(0, partial(_middle, most))
    return transform


def _middle(most: int, image: Image.Image) -> Image.Image:
    """The middle of an image whose longer side is more than `most` times the shorter one."""
    longest = most * min(image.size)
    width, height = (min(side, longest) for side in image.size)
    if (width, height) == image.size:
        return image
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


@contextmanager
def isolated_generators() -> Iterator[None]:
    """Restore Python's, NumPy's and torch's CPU generators afterwards."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def seed_generators(*key: int) -> None:
    """Seed Python's, NumPy's and torch's CPU generators by a tuple of counters."""
    seed = int(np.random.SeedSequence(key).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


def _ignore_stop_requests(_worker: int) -> None:
    # Ctrl-C reaches the whole process group, a scheduler's SIGTERM often, too; the main process
    # decides when to stop. At its exit it sends each worker that is left one SIGTERM and waits.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS and Windows, which have torch's own handling
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_for_main_process, daemon=True).start()


def _end_for_main_process() -> None:
    """Wait for the main process's SIGTERM, and end; those of other processes are ignored."""
    main = multiprocessing.parent_process().pid
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != main:
        pass
    os._exit(0)
