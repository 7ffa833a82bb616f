"""From a task's items to the batches that the loop iterates over."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset, IterableDataset

from vision_ttt.data import EpochOrder, EvenOrder, Share, make_loader, watched
from vision_ttt.data.loading import end_workers
from vision_ttt.engine.config import ConfigError, TrainConfig
from vision_ttt.engine.task import Batch, Task


@dataclass(frozen=True)
class Loaders:
    """This process's part of the training and the test items."""

    train: DataLoader
    test: DataLoader
    order: EpochOrder | None
    """Of the training items; None where they are streamed."""
    updates_per_epoch: int
    config: TrainConfig

    def updates(self, epoch: int, done: int) -> Iterator[list[Batch]]:
        """Yield the micro-batches of an epoch's updates, but for the first `done` of them."""
        parts = self.config.optimisation.accumulation_steps
        self.train.dataset.epoch = epoch
        # Streaming readers seed their workers by it: an epoch must not depend on those before.
        self.train.generator.manual_seed(self.config.run.seed + epoch)
        if self.order is not None:
            self.order.begin(epoch, skipped=done * parts)
            batches = watched(self.train)
        else:
            total = self.updates_per_epoch * parts
            batches = itertools.islice(watched(self.train), done * parts, total)
        while update := list(itertools.islice(batches, parts)):
            yield update

    def end(self) -> None:
        """End the worker processes, which live as long as the run."""
        for loader in (self.train, self.test):
            end_workers(loader)


def make_loaders(task: Task, config: TrainConfig, accelerator: Accelerator) -> Loaders:
    """Return the loaders of one process of a run.

    Raises:
        ConfigError: too few items for a batch; streamed items and several processes.
    """
    train_set, optimisation, seed = task.train_set, config.optimisation, config.run.seed
    share = _share(train_set, accelerator)
    count, size = len(train_set), optimisation.batch_size
    if count < size:
        raise ConfigError(
            f"batch_size is {size}, but the training data have {count} items; it must be at most"
            " that"
        )
    updates = count // size  # items that do not fill a batch wait for the next epoch
    order = None
    if not isinstance(train_set, IterableDataset):
        order = EpochOrder(
            count,
            updates * optimisation.accumulation_steps,
            optimisation.micro_batch_size,
            seed=seed,
            repeats=task.repeats,
            share=share,
        )
    batch_size = optimisation.micro_batch_size // share.count
    options = {
        "num_workers": config.machine.num_workers,
        "timeout": config.machine.loader_timeout,
        "persistent_workers": True,
    }
    return Loaders(
        make_loader(train_set, batch_size, task.collate, order=order, seed=seed, **options),
        evaluation_loader(task.test_set, batch_size, task.collate, accelerator, **options),
        order,
        updates,
        config,
    )


def evaluation_loader(
    items: Dataset,
    batch_size: int,
    collate: Callable[[Sequence[Any]], Batch],
    accelerator: Accelerator,
    *,
    num_workers: int = 0,
    timeout: float = 0.0,
    persistent_workers: bool = False,
) -> DataLoader:
    """Return the loader of this process's part of the items that are evaluated.

    Raises:
        ConfigError: streamed items and several processes.
    """
    share = _share(items, accelerator)
    order = None if isinstance(items, IterableDataset) else EvenOrder(len(items), share)
    return make_loader(
        items,
        batch_size,
        collate,
        num_workers=num_workers,
        order=order,
        timeout=timeout,
        persistent_workers=persistent_workers,
    )


def _share(items: Dataset, accelerator: Accelerator) -> Share:
    share = Share(accelerator.process_index, accelerator.num_processes)
    if share.count > 1 and isinstance(items, IterableDataset):
        raise ConfigError(
            "the dataset is streamed, and several processes cannot divide a stream exactly; use"
            " one process, or data that can be read in any order (folders, shards)"
        )
    return share
