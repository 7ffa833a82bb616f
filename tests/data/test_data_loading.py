"""Augmentation and order follow from the seed alone; damaged images are left out by name."""

import random

import numpy as np
import pytest
import torch

from vision_ttt.data import Digits, EpochOrder, ImageError, TransformedImages, make_loader
from vision_ttt.data.loading import isolated_seed, train_transform

DATA_CONFIG = {
    "input_size": (3, 32, 32),
    "interpolation": "bicubic",
    "mean": (0.5, 0.5, 0.5),
    "std": (0.5, 0.5, 0.5),
}


def _augmented(seed: int = 0, epoch: int = 0) -> TransformedImages:
    transform = train_transform(
        DATA_CONFIG, auto_augment="rand-m9-mstd0.5-inc1", random_erasing=0.5, color_jitter=0.3
    )
    images = TransformedImages(Digits("test"), transform, seed)
    images.epoch = epoch
    return images


def test_augmentation_depends_on_seed_epoch_and_index_alone() -> None:
    image = _augmented()[7][0]
    images = _augmented()
    _ = images[3]
    torch.manual_seed(1)
    assert torch.equal(images[7][0], image)
    assert not torch.equal(_augmented(epoch=1)[7][0], image)
    assert not torch.equal(_augmented(seed=1)[7][0], image)


def test_augmentation_does_not_depend_on_the_number_of_workers() -> None:
    order = EpochOrder(500, 12, seed=0)
    order.begin(epoch=1)
    alone, together = (
        torch.cat([b["images"] for b in make_loader(_augmented(), 4, num_workers=n, order=order)])
        for n in (0, 2)
    )
    assert torch.equal(alone, together)


def test_isolated_seed_restores_the_generators() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), np.random.rand(), torch.rand(1).item()

    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    expected = draw()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    with isolated_seed(1, 2, 3):
        inside = draw()
    assert draw() == expected
    assert inside != expected


def test_order_is_a_seeded_permutation_that_can_begin_anywhere() -> None:
    order = EpochOrder(10, 8, seed=3)
    order.begin(epoch=5)
    whole = list(order)
    assert (len(order), len(set(whole))) == (8, 8)
    assert set(whole) <= set(range(10))
    order.begin(epoch=5, skipped=6)
    assert (len(order), list(order)) == (2, whole[6:])
    order.begin(epoch=6)
    assert list(order) != whole


class _SomeBad(Digits):
    def __getitem__(self, index: int):
        if index in (1, 2):
            raise ImageError(f"number {index}", "on purpose")
        return super().__getitem__(index)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_bad_images_are_named_and_left_out(num_workers: int) -> None:
    images = TransformedImages(_SomeBad("test"), train_transform(DATA_CONFIG))
    batch = next(iter(make_loader(images, 4, num_workers=num_workers)))
    assert batch["images"].shape == (2, 3, 32, 32)
    assert batch["targets"].tolist() == [images.images.targets[0], images.images.targets[3]]
    assert batch["bad"] == [("number 1", "on purpose"), ("number 2", "on purpose")]
