"""In which order a process sees a dataset's images, alone or as one of several."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch.utils.data import Sampler


@dataclass(frozen=True)
class Share:
    """Which of several processes this is."""

    index: int = 0
    """Of this process, from 0."""
    count: int = 1
    """Of processes."""


class EpochOrder(Sampler[int]):
    """A seeded random order of a dataset per epoch, cut to whole batches, begun anywhere.

    Each batch is divided evenly among the processes, so that together they see the same batches,
    whatever their number. With `repeats` r > 1 every image comes r times in a row, before the order
    is cut (repeated augmentation): its k-th time, from 0, has the number `index + k * length`.
    """

    def __init__(
        self,
        length: int,
        batches: int,
        batch_size: int,
        *,
        seed: int,
        repeats: int = 1,
        share: Share | None = None,
    ) -> None:
        """Order `length` images in `batches` of `batch_size`, over all processes together.

        Raises:
            ValueError: a batch cannot be divided evenly among the processes.
        """
        self.share = Share() if share is None else share
        if batch_size % self.share.count:
            raise ValueError(
                f"a batch of {batch_size} cannot be divided evenly among {self.share.count}"
                " processes"
            )
        self.length = length
        self.batches = batches
        self.batch_size = batch_size
        self.seed = seed
        self.repeats = repeats
        self.epoch = 0
        self.skipped = 0

    # Not called set_epoch: accelerate would call that with a count of its own.
    def begin(self, epoch: int, skipped: int = 0) -> None:
        """Set the epoch that the next iteration orders, and how many of its batches to skip."""
        self.epoch = epoch
        self.skipped = skipped

    @property
    def own_batch_size(self) -> int:
        """This process's part of a batch."""
        return self.batch_size // self.share.count

    def __len__(self) -> int:
        return (self.batches - self.skipped) * self.own_batch_size

    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng((self.seed, self.epoch)).permutation(self.length)
        if self.repeats > 1:
            times = np.arange(self.repeats) * self.length
            order = (order[:, None] + times).reshape(-1)
        taken = order[: self.batches * self.batch_size]
        batches = taken.reshape(-1, self.share.count, self.own_batch_size)
        own = batches[self.skipped :, self.share.index].reshape(-1)
        return map(int, own)  # a list would be several times as large


class EvenOrder(Sampler[int]):
    """A dataset's own order, dealt out to the processes one by one.

    All processes get the same number of images. If the images do not divide evenly, some of the
    first ones occur twice; the caller must drop the repeated ones by their index.
    """

    def __init__(self, length: int, share: Share) -> None:
        self.length = length
        self.share = share

    def __len__(self) -> int:
        return -(-self.length // self.share.count)

    def __iter__(self) -> Iterator[int]:
        for turn in range(len(self)):
            yield (turn * self.share.count + self.share.index) % self.length
