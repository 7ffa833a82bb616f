"""Crops, sizes, flips and colours: labels go where their pixels go."""

import random

import numpy as np
import pytest
import torch
from PIL import Image

from vision_ttt.data import SeededItems
from vision_ttt.data.mask_folders import IGNORED, LabelledImage
from vision_ttt.tasks.segmentation.config import SegmentationData
from vision_ttt.tasks.segmentation.transforms import (
    TestTransform,
    TrainTransform,
    distorted,
    fitted,
)

PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}


def _transform(**changes: float) -> TrainTransform:
    fields = {
        "crop_size": 32,
        "longer_side": 128,
        "shorter_side": 64,
        "test_shorter_side": 32,
        "scale_min": 1.0,
        "scale_max": 1.0,
        "largest_class_share": 1.0,
        "horizontal_flip": 0.0,
        "photometric_distortion": 0.0,
        **changes,
    }
    return TrainTransform(PLAIN, SegmentationData(**fields))


def _written(height: int, width: int) -> LabelledImage:
    """An image whose pixels are the labels of theirs, in patches of 8 × 8."""
    patches = np.arange(-(-height // 8) * -(-width // 8)).reshape(-(-height // 8), -1) % 250
    labels = np.kron(patches, np.ones((8, 8)))[:height, :width].astype(np.uint8)
    return LabelledImage(Image.fromarray(np.stack([labels] * 3, axis=-1)), labels)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((640, 480), (683, 512)),
        ((4800, 480), (2048, 205)),
        ((100, 200), (512, 1024)),
        ((1, 9000), (1, 2048)),
    ],
)
def test_sizes_keep_their_ratio_and_both_bounds(
    size: tuple[int, int], expected: tuple[int, int]
) -> None:
    assert fitted(size, 2048, 512) == expected


def test_labels_follow_their_pixels_through_crop_and_flip() -> None:
    item = _written(64, 96)
    flipped = 0
    for seed in range(12):
        random.seed(seed)
        image, labels, index = _transform(horizontal_flip=0.5)(item, 7)
        assert (image.shape, labels.shape, index) == ((3, 32, 32), (32, 32), 7)
        assert labels.dtype == torch.uint8
        assert torch.equal((image[0] * 255).round().to(torch.uint8), labels)
        row = labels[16].int()
        flipped += bool((row.diff() < 0).sum() > (row.diff() > 0).sum())
    assert 2 <= flipped <= 10


def test_scaled_labels_stay_labels_and_lie_on_their_pixels() -> None:
    item = _written(64, 96)
    for seed in range(4):
        random.seed(seed)
        image, labels, _ = _transform(scale_min=0.6, scale_max=2.0, crop_size=48)(item, 0)
        labels = labels.int()
        inside = labels != IGNORED
        assert set(labels[inside].unique().tolist()) <= set(np.unique(item.labels).tolist())
        # Bilinear pixels differ from nearest labels at the patches' borders alone.
        same = (image[0] * 255 - labels).abs()[inside] < 1
        assert same.float().mean() > 0.55


@pytest.mark.parametrize("scale", [0.6, 1.7])
def test_a_crop_is_that_of_the_resized_image(scale: float) -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8))
    labels = np.zeros((64, 96), np.uint8)
    random.seed(1)
    crop, _, _ = _transform(scale_min=scale, scale_max=scale)(LabelledImage(image, labels), 0)
    width, height = fitted(image.size, 128 * scale, 64 * scale)
    whole = np.asarray(image.resize((width, height), Image.Resampling.BILINEAR)).astype(int)
    pixels = (crop.permute(1, 2, 0) * 255).round().int().numpy()
    differences = [
        np.abs(whole[top : top + 32, left : left + 32] - pixels).max()
        for top in range(height - 31)
        for left in range(width - 31)
    ]
    assert min(differences) <= 1


def test_what_lies_beyond_a_small_image_has_no_class() -> None:
    sizes = {"crop_size": 64, "shorter_side": 40, "longer_side": 48}
    image, labels, _ = _transform(**sizes)(_written(40, 48), 0)
    assert (labels[:40, :48] != IGNORED).all()
    assert (labels[40:] == IGNORED).all()
    assert (labels[:, 48:] == IGNORED).all()
    assert not image[:, 40:].any()
    assert not image[:, :, 48:].any()
    assert image[:, :40, :48].any()


def test_a_crop_of_one_class_is_drawn_anew() -> None:
    labels = np.zeros((64, 256), np.uint8)
    labels[:, 64:128] = labels[:, 192:] = 1
    labels[:20] = IGNORED
    item = LabelledImage(Image.fromarray(labels).convert("RGB"), labels)

    def largest(share: float) -> list[float]:
        found = []
        for seed in range(20):
            random.seed(seed)
            transform = _transform(longer_side=256, largest_class_share=share)
            counts = transform(item, 0).labels.flatten().bincount(minlength=256)[:IGNORED]
            found.append((counts.max() / counts.sum().clamp(min=1)).item())
        return found

    assert sum(share > 0.75 for share in largest(1.0)) >= 12
    assert sum(share > 0.75 for share in largest(0.75)) <= 4


def test_colours_change_within_their_ranges_and_only_then() -> None:
    image = _written(16, 16).image
    assert distorted(image, 0.0).tobytes() == image.tobytes()
    means = []
    for seed in range(60):
        random.seed(seed)
        means.append(np.asarray(distorted(Image.new("RGB", (4, 4), (100, 100, 100)), 0.5)).mean())
    # Grey stays grey: 100 ± 32 levels, times 0.5 to 1.5.
    assert 34 <= min(means) < 60
    assert 140 < max(means) <= 198
    white = Image.new("RGB", (2, 2), (250, 250, 250))
    for seed in range(20):  # bright pixels are clipped, and do not begin at 0 again
        random.seed(seed)
        assert np.asarray(distorted(white, 1.0)).min() >= 108


def test_items_are_the_same_whoever_reads_them() -> None:
    items = [_written(64, 96), _written(72, 64)]
    transform = _transform(scale_max=2.0, horizontal_flip=0.5, photometric_distortion=0.5)
    read = SeededItems(items, transform, seed=3)
    alone = SeededItems(items, transform, seed=3)
    first = read[0]
    assert torch.equal(alone.__getitems__([1, 0])[1].image, first.image)
    read.epoch = 1
    assert not torch.equal(read[0].image, first.image)


def test_at_test_the_image_is_resized_and_the_labels_are_not() -> None:
    item = _written(50, 80)
    image, labels, index = TestTransform(PLAIN, 128, 32)(item, 4)
    assert (image.shape, index) == ((3, 32, 51), 4)
    assert torch.equal(labels, torch.from_numpy(item.labels))
    normalised = TestTransform({"mean": (0.5,) * 3, "std": (0.25,) * 3}, 128, 50).image(item.image)
    plain = TestTransform(PLAIN, 128, 50).image(item.image)
    torch.testing.assert_close(normalised, (plain - 0.5) / 0.25)
