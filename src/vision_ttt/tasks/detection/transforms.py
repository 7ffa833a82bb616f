"""Images with objects as a detector sees them: resized, in training also cut and flipped."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import faster_coco_eval.core.mask as rle_masks
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from vision_ttt.data.coco import AnnotatedImage
from vision_ttt.data.coco_checks import Rle
from vision_ttt.tasks.detection.config import DetectionData

_STEP = 32  # pixels from one shorter side to the next
_CROP_SHORTER_SIDES = (400, 500, 600)
_CROP_SIDES = (384, 600)


class Sample(NamedTuple):
    """An image as `Detection.collate` gets it."""

    image: Tensor
    """[3, h, w] uint8."""
    target: dict[str, Tensor] | None
    """boxes [n, 4] float32 x, y, x, y in its pixels, labels [n] int64 from 1, masks [n, h, w]
    uint8; None for test images."""
    size: tuple[int, int]
    """Height and width that it had before."""
    index: int
    """Its place in the dataset."""


class Window(NamedTuple):
    """A part of an image in whole pixels."""

    left: int
    top: int
    width: int
    height: int


@dataclass(frozen=True)
class TestTransform:
    """Resizes an image to the config's size; its objects are left out."""

    shorter_side: int
    longer_side: int

    __test__ = False  # not one of pytest's

    def __call__(self, item: AnnotatedImage, index: int) -> Sample:
        """Return the sample of an item."""
        width, height = item.image.size
        return Sample(self.image(item.image), None, (height, width), index)

    def image(self, image: Image.Image) -> Tensor:
        """Return an RGB image, resized, as [3, h, w] uint8."""
        size = resized(image.height, image.width, self.shorter_side, self.longer_side)
        return pil_to_tensor(image.resize(size[::-1], Image.Resampling.BILINEAR))


@dataclass(frozen=True)
class TrainTransform:
    """Cuts, resizes and flips an image at random, with its boxes and masks.

    An object that is cut gets the box of what is left of its mask; one of which nothing is left is
    left out.
    """

    data: DetectionData

    def __call__(self, item: AnnotatedImage, index: int) -> Sample:
        """Return the sample of an item, drawn from Python's global generator."""
        width, height = item.image.size
        window = Window(0, 0, width, height)
        if self.data.crop and random.random() < 0.5:
            window = random_window(height, width)
        shorter = random.choice(shorter_sides(self.data))
        size = resized(window.height, window.width, shorter, self.data.longer_side)
        flips = random.random() < self.data.horizontal_flip
        left, top = window.left, window.top
        image = item.image.resize(
            size[::-1],
            Image.Resampling.BILINEAR,
            box=(left, top, left + window.width, top + window.height),
        )
        if flips:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        boxes, cut = cut_boxes(item.boxes, window, size)
        masks = cut_masks(item.masks, window, size)
        boxes[cut] = mask_boxes(masks[torch.from_numpy(cut)]).double().numpy()
        found = torch.from_numpy(boxes).float()
        labels = torch.from_numpy(item.labels)
        if flips:
            found[:, [0, 2]] = size[1] - found[:, [2, 0]]
            masks = masks.flip(2)
        # A box that float32 cannot tell from one without area is lost, too.
        kept = ((found[:, 2] > found[:, 0]) & (found[:, 3] > found[:, 1])).nonzero()[:, 0]
        target = {"boxes": found[kept], "labels": labels[kept], "masks": masks[kept].contiguous()}
        return Sample(pil_to_tensor(image), target, (height, width), index)


def shorter_sides(data: DetectionData) -> Sequence[int]:
    """Return the shorter sides that training images are resized to."""
    if data.shorter_side_least is None:
        return [data.shorter_side]
    return range(data.shorter_side, data.shorter_side_least - 1, -_STEP)


def resized(height: int, width: int, shorter: int, longer: int) -> tuple[int, int]:
    """Return height and width of an image whose shorter side becomes `shorter`.

    Where its longer side would exceed `longer`, that becomes `longer` instead.
    """
    scale = min(shorter / min(height, width), longer / max(height, width))
    return max(round(height * scale), 1), max(round(width * scale), 1)


def random_window(height: int, width: int) -> Window:
    """Return a window of an image of which the sides would have 384 to 600 pixels.

    That is where the image's shorter side would have 400, 500 or 600.
    """
    scale = random.choice(_CROP_SHORTER_SIDES) / min(height, width)
    low, high = _CROP_SIDES
    sides = []
    for side in (height, width):
        scaled = round(side * scale)
        drawn = random.randint(min(low, scaled), min(high, scaled))
        sides.append(min(max(round(drawn / scale), 1), side))
    top, left = random.randint(0, height - sides[0]), random.randint(0, width - sides[1])
    return Window(left, top, sides[1], sides[0])


def cut_boxes(
    boxes: np.ndarray, window: Window, size: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the parts of boxes [n, 4] in a window that becomes `size` (height, width).

    Also returns which of them [n] do not lie wholly in the window.
    """
    shifted = boxes - np.array([window.left, window.top] * 2, dtype=np.float64)
    within = shifted.clip(0, np.array([window.width, window.height] * 2, dtype=np.float64))
    scale = np.array([size[1] / window.width, size[0] / window.height] * 2)
    return within * scale, (within != shifted).any(axis=1)


def cut_masks(masks: Sequence[Rle], window: Window, size: tuple[int, int]) -> Tensor:
    """Return the parts of masks in a window that becomes `size`: [n, height, width] uint8."""
    left, top, width, height = window
    seen = torch.zeros(len(masks), *size, dtype=torch.uint8)
    for mask, own in zip(masks, seen, strict=True):  # one at a time is as large as the image
        cut = torch.from_numpy(rle_masks.decode(mask)[top : top + height, left : left + width])
        own[:] = F.interpolate(cut[None, None], size, mode="nearest-exact")[0, 0]
    return seen


def mask_boxes(masks: Tensor) -> Tensor:
    """Return the boxes x, y, x, y [n, 4] around masks [n, h, w]; of an empty one, all zeros."""
    boxes = torch.zeros(len(masks), 4)
    for axis, (low, high) in ((1, (0, 2)), (2, (1, 3))):
        held = masks.amax(dim=axis)  # [n, w], then [n, h]
        boxes[:, low] = held.argmax(dim=1).float()
        boxes[:, high] = held.shape[1] - held.flip(1).argmax(dim=1).float()
    boxes[masks.amax(dim=(1, 2)) == 0] = 0.0
    return boxes
