"""Augmentation and order follow from the seed alone; damaged images are left out by name."""

import multiprocessing
import random

import numpy as np
import pytest
import torch
from PIL import Image

from vision_ttt.data import (
    Digits,
    EpochOrder,
    EvenOrder,
    ImageError,
    SeededItems,
    Share,
    collate,
    make_loader,
    with_transform,
)
from vision_ttt.data.loading import (
    SharedEpoch,
    check_auto_augment,
    end_workers,
    evaluation_transform,
    isolated_generators,
    seed_generators,
    train_transform,
)

DATA_CONFIG = {
    "input_size": (3, 32, 32),
    "interpolation": "bicubic",
    "mean": (0.5, 0.5, 0.5),
    "std": (0.5, 0.5, 0.5),
}


def _augmented(seed: int = 0, epoch: int = 0) -> SeededItems:
    transform = train_transform(
        DATA_CONFIG, auto_augment="rand-m9-mstd0.5-inc1", random_erasing=0.5, color_jitter=0.3
    )
    images = with_transform(Digits("test"), transform, seed)
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
    order = EpochOrder(500, 3, 4, seed=0)
    order.begin(epoch=1)

    def images(num_workers: int) -> torch.Tensor:
        loader = make_loader(_augmented(), 4, collate, num_workers=num_workers, order=order)
        return torch.cat([batch["images"] for batch in loader])

    assert torch.equal(images(num_workers=0), images(num_workers=2))


def test_persistent_workers_augment_by_the_epoch() -> None:
    order = EpochOrder(500, 3, 4, seed=0)
    options = {"order": order, "persistent_workers": True}
    alone = make_loader(_augmented(), 4, collate, **options)
    persistent = make_loader(_augmented(), 4, collate, **options, num_workers=1)
    before, processes = set(multiprocessing.active_children()), set()
    try:
        for epoch, skipped in ((1, 0), (2, 0), (2, 2), (1, 1)):
            order.begin(epoch, skipped)
            batches = []
            for loader in (alone, persistent):
                loader.dataset.epoch = epoch
                batches.append([batch["images"] for batch in loader])
            assert len(batches[0]) == 3 - skipped
            assert all(map(torch.equal, *batches))
            processes |= set(multiprocessing.active_children()) - before
        # An iteration that ends early leaves nothing of its epoch to the next one.
        persistent.dataset.epoch = 5
        next(iter(persistent))
        persistent.dataset.epoch = 1
        again = [batch["images"] for batch in persistent]
        assert all(map(torch.equal, again, batches[0]))
        assert len(processes) == 1
    finally:
        end_workers(persistent)
    assert not processes & set(multiprocessing.active_children())


def test_a_shared_epoch_begins_as_that_of_the_items_which_may_have_none() -> None:
    items = _augmented(epoch=3)
    shared = SharedEpoch(items)
    (image, *_), (wanted, *_) = *shared.__getitems__([5]), items[5]
    assert (shared.epoch, items.epoch) == (3, 3)
    assert torch.equal(image, wanted)
    assert SharedEpoch([7, 8, 9]).__getitems__([2, 0]) == [9, 7]


def test_isolated_generators_are_restored() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), np.random.rand(), torch.rand(1).item()

    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    expected = draw()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    with isolated_generators():
        seed_generators(1, 2, 3)
        inside = draw()
    assert draw() == expected
    assert inside != expected


def test_order_is_a_seeded_permutation_that_can_begin_anywhere() -> None:
    order = EpochOrder(10, 4, 2, seed=3)
    order.begin(epoch=5)
    whole = list(order)
    assert (len(order), len(set(whole))) == (8, 8)
    assert set(whole) <= set(range(10))
    order.begin(epoch=5, skipped=3)
    assert (len(order), list(order)) == (2, whole[6:])
    order.begin(epoch=6)
    assert list(order) != whole


def test_processes_divide_each_batch_of_the_same_order() -> None:
    alone = EpochOrder(40, 3, 12, seed=3)
    parts = [EpochOrder(40, 3, 12, seed=3, share=Share(index, 3)) for index in range(3)]
    for order in (alone, *parts):
        order.begin(epoch=2, skipped=1)
    batches = [list(alone)[first : first + 12] for first in (0, 12)]
    for number, batch in enumerate(batches):
        shares = [list(order)[4 * number : 4 * number + 4] for order in parts]
        assert [number for share in shares for number in share] == batch
    assert [len(order) for order in parts] == [8, 8, 8]
    with pytest.raises(ValueError, match=r"batch of 10 .* 3 processes"):
        EpochOrder(40, 3, 10, seed=3, share=Share(0, 3))


@pytest.mark.parametrize(("length", "count"), [(7, 2), (8, 2), (2, 3), (5, 1)])
def test_processes_evaluate_every_image_equally_often_asked(length: int, count: int) -> None:
    orders = [EvenOrder(length, Share(index, count)) for index in range(count)]
    assert len({len(order) for order in orders}) == 1
    assert all(len(list(order)) == len(order) for order in orders)
    seen = sorted(number for order in orders for number in order)
    assert set(seen) == set(range(length))
    assert len(seen) - length < count


def test_repeated_augmentation_shows_an_image_several_times_and_differently() -> None:
    order = EpochOrder(500, 3, 6, seed=0, repeats=3)
    order.begin(epoch=0)
    batch = list(order)[:6]
    assert [number % 500 for number in batch] == [batch[0]] * 3 + [batch[3]] * 3
    images = _augmented()
    views = [images[number] for number in batch[:3]]
    assert {index for _, _, index in views} == {batch[0]}
    assert len({target for _, target, _ in views}) == 1
    assert not torch.equal(views[0][0], views[1][0])
    assert not torch.equal(views[1][0], views[2][0])


def test_three_augment_greys_solarises_or_blurs() -> None:
    """DeiT III's ThreeAugment, as timm's policy 3a: one of three changes, each a third of times."""
    data_config = {**DATA_CONFIG, "mean": (0.0,) * 3, "std": (1.0,) * 3}
    transform = train_transform(
        data_config, auto_augment="3a", crop_scale=1.0, crop_ratio=1.0, horizontal_flip=0.0
    )
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    plain = torch.from_numpy(pixels).permute(2, 0, 1) / 255
    changes = dict.fromkeys(("grey", "solarised", "blurred"), 0)
    random.seed(0)
    torch.manual_seed(0)
    for _ in range(60):
        image = transform(Image.fromarray(pixels))
        if torch.equal(image[0], image[1]):
            changes["grey"] += 1
        elif torch.allclose(image.minimum(1 - image), plain.minimum(1 - plain), atol=1e-6):
            changes["solarised"] += 1
        else:
            assert image.std() < plain.std()
            changes["blurred"] += 1
    assert all(10 <= count <= 30 for count in changes.values()), changes


class _SomeBad(Digits):
    def __getitem__(self, index: int):
        if index in (1, 2):
            raise ImageError(f"number {index}", "on purpose")
        return super().__getitem__(index)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_damaged_images_are_named_and_left_out(num_workers: int) -> None:
    images = with_transform(_SomeBad("test"), train_transform(DATA_CONFIG), 0)
    batch = next(iter(make_loader(images, 4, collate, num_workers=num_workers)))
    assert batch["images"].shape == (2, 3, 32, 32)
    assert batch["targets"].tolist() == [images.items.targets[0], images.items.targets[3]]
    damages = [(type(error), error.name, error.reason) for error in batch["damaged"]]
    assert damages == [(ImageError, f"number {number}", "on purpose") for number in (1, 2)]


@pytest.mark.parametrize(
    "policy",
    [
        *("rand", "rand-m9-n3-mstd0.5", "rand-m9-mmax20-inc1-p0.5", "rand-t3aw-mstd101"),
        *("rand-mstd1-tweights", "augmix", "augmix-m5-w4-d2-b1-a0.5-mstd1", "3a"),
        *("v0", "v0r-mstd0.5", "original", "originalr-mstd1"),
    ],
)
def test_policies_of_timms(policy: str) -> None:
    train_transform(DATA_CONFIG, auto_augment=policy)


@pytest.mark.parametrize(
    "policy",
    [
        *("", "-", "rnad-m9", "RAND", "rand9", "v1", "randm9-n2", "rand m9", "3A"),
        *("rand-", "rand-m", "rand-mstd", "rand-msdt0.5", "rand-m9.5", "rand-foo", "rand-typo"),
        *("rand-m9--n2", "rand-m9x", "rand-m-9", "augmix-n3", "augmix-d-1", "v0-m9", "v0-foo"),
    ],
)
def test_policies_that_timm_would_read_in_part(policy: str) -> None:
    with pytest.raises(ValueError, match="accepted: "):
        check_auto_augment(policy)


@pytest.mark.parametrize("size", [(3, 20_000), (20_000, 3), (4096, 1), (48, 32)])
@pytest.mark.parametrize("mode", ["center", "border", "squash"])
def test_narrow_images_are_not_resized_whole(
    monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], mode: str
) -> None:
    """At 224 pixels, timm would make 437 million pixels of 3 × 20,000."""
    told = {"input_size": (3, 32, 32), "interpolation": "bicubic", "crop_pct": 0.875}
    told |= {"mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_mode": mode}
    image = Image.new("RGB", size, "red")
    middle = tuple(side // 2 for side in size)
    image.paste("white", (*(max(at - 24, 0) for at in middle), *(at + 24 for at in middle)))
    made: list[int] = []
    resize = Image.Image.resize

    def resized(image: Image.Image, size: tuple[int, int], *rest: object, **more: object) -> object:
        made.append(size[0] * size[1])
        return resize(image, size, *rest, **more)

    monkeypatch.setattr(Image.Image, "resize", resized)
    seen = evaluation_transform(told)(image)
    assert seen.shape == (3, 32, 32)
    assert max(made) <= 16 * 36**2
    if mode == "center":
        assert (seen == 1).all()


def test_borders_show_the_whole_of_a_narrow_image() -> None:
    told = {"input_size": (3, 32, 32), "interpolation": "nearest", "crop_pct": 1.0}
    told |= {"mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_mode": "border"}
    image = Image.new("RGB", (640, 32), "red")
    image.paste("blue", (0, 0, 64, 32))
    red, _, blue = evaluation_transform(told)(image)
    assert ((blue > red).any(0).sum(), (red > blue).any(0).sum()) == (3, 29)
