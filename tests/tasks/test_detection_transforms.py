"""What a detector sees of an image: sizes, windows, flips, boxes that fit their masks."""

import random
from dataclasses import replace
from typing import Any

import faster_coco_eval.core.mask as rle_masks
import numpy as np
import pytest
import torch
from PIL import Image

from vision_ttt.data import SeededItems
from vision_ttt.data.coco import AnnotatedImage
from vision_ttt.engine.config import ConfigError
from vision_ttt.tasks.detection.config import DetectionData
from vision_ttt.tasks.detection.transforms import (
    TestTransform,
    TrainTransform,
    Window,
    cut_boxes,
    cut_masks,
    mask_boxes,
    random_window,
    resized,
    shorter_sides,
)

WIDTH, HEIGHT = 120, 80


def _item(*rectangles: tuple[int, int, int, int]) -> AnnotatedImage:
    """A black image in which the rectangles x, y, x, y are white."""
    pixels = np.zeros((HEIGHT, WIDTH), dtype=np.uint8)
    masks = []
    for x0, y0, x1, y1 in rectangles:
        mask = np.zeros((HEIGHT, WIDTH), dtype=np.uint8, order="F")
        mask[y0:y1, x0:x1] = 1
        masks.append(rle_masks.encode(mask))
        pixels |= mask
    return AnnotatedImage(
        Image.fromarray(pixels * 255).convert("RGB"),
        np.array(rectangles, dtype=np.float64).reshape(-1, 4),
        np.arange(1, len(rectangles) + 1),
        masks,
    )


def _data(**changes: Any) -> DetectionData:
    fields = {"shorter_side": 40, "longer_side": 80, "horizontal_flip": 0.0}
    return DetectionData(**{**fields, **changes})


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((480, 640), (800, 1067)),
        ((640, 480), (1067, 800)),
        ((400, 1000), (533, 1333)),
        ((1, 4000), (1, 1333)),
    ],
)
def test_proportions_are_kept_within_the_longer_side(
    size: tuple[int, int], expected: tuple[int, int]
) -> None:
    assert resized(*size, 800, 1333) == expected


def test_test_images_are_resized_only() -> None:
    sample = TestTransform(40, 80)(_item((0, 0, 60, 80)), 3)
    assert (sample.size, sample.index, sample.target) == ((HEIGHT, WIDTH), 3, None)
    assert sample.image.dtype == torch.uint8
    assert sample.image.shape == (3, 40, 60)
    assert (sample.image[:, :, :29] == 255).all()
    assert (sample.image[:, :, 31:] == 0).all()


def test_boxes_and_masks_go_with_the_image() -> None:
    sample = TrainTransform(_data())(_item((12, 20, 60, 40), (90, 0, 120, 80)), 0)
    assert sample.image.shape == (3, 40, 60)
    assert sample.target["boxes"].tolist() == [[6, 10, 30, 20], [45, 0, 60, 40]]
    assert sample.target["boxes"].dtype == torch.float32
    assert sample.target["labels"].tolist() == [1, 2]
    assert sample.target["masks"].dtype == torch.uint8
    union = sample.target["masks"].amax(dim=0)
    assert ((sample.image[0] > 127) == (union > 0)).all()
    assert torch.equal(mask_boxes(sample.target["masks"]), sample.target["boxes"])


def test_a_flip_mirrors_all_of_it() -> None:
    item = _item((12, 20, 60, 40))
    plain = TrainTransform(_data())(item, 0)
    flipped = TrainTransform(_data(horizontal_flip=1.0))(item, 0)
    assert torch.equal(flipped.image, plain.image.flip(2))
    assert torch.equal(flipped.target["masks"], plain.target["masks"].flip(2))
    assert flipped.target["boxes"].tolist() == [[30, 10, 54, 20]]


def test_what_a_window_cuts_gets_the_box_of_its_mask() -> None:
    boxes = np.array([[10.0, 10.0, 50.0, 30.0], [0.0, 0.0, 8.0, 8.0], [60.0, 40.0, 70.0, 50.0]])
    found, cut = cut_boxes(boxes, Window(20, 0, 60, 60), (120, 120))
    assert found[[0, 2]].tolist() == [[0, 20, 60, 60], [80, 80, 100, 100]]
    assert cut.tolist() == [True, True, False]
    # A triangle, of which the window leaves a part that is lower than its box.
    mask = np.zeros((HEIGHT, WIDTH), dtype=np.uint8, order="F")
    for row in range(40):
        mask[20 + row, : 40 - row] = 1
    masks = cut_masks([rle_masks.encode(mask)], Window(30, 10, 80, 60), (60, 80))
    assert mask_boxes(masks).tolist() == [[0, 10, 10, 20]]
    assert mask_boxes(torch.zeros(1, 4, 4, dtype=torch.uint8)).tolist() == [[0, 0, 0, 0]]


def test_cropped_objects_keep_image_box_and_mask_together() -> None:
    random.seed(0)
    transform = TrainTransform(_data(crop=True, horizontal_flip=0.5, shorter_side=64))
    item = _item((5, 5, 25, 30), (80, 50, 118, 78), (50, 10, 60, 20))
    seen, lost = set(), 0
    for _ in range(60):
        sample = transform(item, 0)
        boxes, masks = sample.target["boxes"], sample.target["masks"]
        assert masks.shape[1:] == sample.image.shape[1:]
        seen.add(tuple(sample.image.shape))
        lost += 3 - len(boxes)
        assert masks.amax(dim=(1, 2)).bool().all()
        # Nearest neighbours and bilinear pixels differ by a pixel at edges.
        assert (mask_boxes(masks) - boxes).abs().max() <= 1.0
        bright = sample.image[0] > 127
        apart = (bright != (masks.amax(dim=0) > 0)).float().mean()
        assert apart < 0.06
    assert len(seen) > 10
    assert lost > 5


def test_windows_are_those_of_the_policy() -> None:
    random.seed(1)
    for height, width in ((480, 640), (30, 90), (2000, 1000)):
        for _ in range(30):
            window = random_window(height, width)
            assert 0 <= window.left <= width - window.width
            assert 0 <= window.top <= height - window.height
            # At the least of the scales, 384 pixels; at the largest, 600.
            assert window.height >= 384 / 600 * min(height, width) - 1
            assert window.width <= 600 / 400 * min(height, width) + 1


def test_an_image_without_objects_and_objects_of_no_size() -> None:
    sample = TrainTransform(_data(crop=True))(_item(), 0)
    shapes = {name: tuple(value.shape) for name, value in sample.target.items()}
    assert shapes == {"boxes": (0, 4), "labels": (0,), "masks": (0, *sample.image.shape[1:])}
    item = _item((10, 10, 20, 20), (30, 30, 40, 40))
    item.boxes[0] = [119.0, 10.0, 119.0 + 1e-9, 20.0]
    sample = TrainTransform(_data())(item, 0)
    assert sample.target["labels"].tolist() == [2]


def test_augmentation_depends_on_seed_epoch_and_number_alone() -> None:
    items = [_item((5, 5, 25, 30)), _item((80, 50, 118, 78))] * 4
    transform = TrainTransform(_data(crop=True, shorter_side=64, shorter_side_least=32))
    first, second = SeededItems(items, transform, 1), SeededItems(items, transform, 1)
    alone = second[5]
    every = first.__getitems__(range(8))
    assert torch.equal(every[5].image, alone.image)
    assert torch.equal(every[5].target["boxes"], alone.target["boxes"])
    first.epoch = 1
    shapes = [
        [tuple(s.image.shape) for s in each] for each in (every, first.__getitems__(range(8)))
    ]
    assert shapes[0] != shapes[1]


def test_sides_of_the_config() -> None:
    published = DetectionData(shorter_side_least=480)
    assert sorted(shorter_sides(published)) == list(range(480, 801, 32))
    assert list(shorter_sides(DetectionData())) == [800]
    with pytest.raises(ConfigError, match=r"shorter_side_least is 801; .* at most shorter_side"):
        replace(published, shorter_side_least=801)
    with pytest.raises(ConfigError, match=r"shorter_side is 1400; .* at most longer_side \(1333\)"):
        DetectionData(shorter_side=1400)


def test_memory_of_masks_is_that_of_one_image(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    decode = rle_masks.decode
    monkeypatch.setattr(
        rle_masks, "decode", lambda mask: decoded.append(decode(mask).size) or decode(mask)
    )
    mask = np.zeros((80, 100), dtype=np.uint8, order="F")
    mask[30:60, 20:70] = 1
    masks = [rle_masks.encode(mask)] * 3
    found = cut_masks(masks, Window(10, 20, 80, 40), (20, 40))
    assert decoded == [8000] * 3
    assert found.shape == (3, 20, 40)
    assert found.sum(dim=(1, 2)).tolist() == [15 * 25] * 3
