"""Images with labels as tensors: random size, crop, flip and colours; a fixed size for test."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torchvision.transforms import functional as vision

from vision_ttt.data.mask_folders import IGNORED, LabelledImage
from vision_ttt.tasks.images.models import normalise
from vision_ttt.tasks.segmentation.config import SegmentationData

_CROPS = 10  # tries to find one that no class fills
_BRIGHTNESS = 32  # of 255 levels
_CONTRAST = _SATURATION = (0.5, 1.5)
_HUE = 0.1  # of a turn


class LabelledTensors(NamedTuple):
    """What a transform makes of a :class:`LabelledImage`."""

    image: Tensor
    """[3, h, w] float32, normalised."""
    labels: Tensor
    """[H, W] uint8: class indices, and `IGNORED`. At test of the mask's own size."""
    index: int
    """The item's place in its dataset."""


@dataclass(frozen=True)
class TrainTransform:
    """Random size, crop, flip and colours.

    What is random is drawn from Python's global generator, which the items' reader seeds.
    """

    statistics: Mapping[str, Sequence[float]]
    """Mean and standard deviation of the colours, by channel."""
    data: SegmentationData

    def __call__(self, item: LabelledImage, index: int) -> LabelledTensors:
        """Return a crop: image [3, c, c] and labels [c, c]; beyond the image they are 0 and
        `IGNORED`."""
        image, labels = item
        scale = random.uniform(self.data.scale_min, self.data.scale_max)
        size = fitted(image.size, scale * self.data.longer_side, scale * self.data.shorter_side)
        labels = np.asarray(Image.fromarray(labels).resize(size, Image.Resampling.NEAREST))
        left, top, right, bottom = self._crop(labels)
        image = _resized_part(image, size, (left, top, right, bottom))
        labels = labels[top:bottom, left:right]
        if random.random() < self.data.horizontal_flip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            labels = labels[:, ::-1]
        image = distorted(image, self.data.photometric_distortion)
        pixels = normalise(vision.pil_to_tensor(image), self.statistics)
        missing = (0, self.data.crop_size - (right - left), 0, self.data.crop_size - (bottom - top))
        return LabelledTensors(
            F.pad(pixels, missing),
            F.pad(torch.from_numpy(labels.copy()), missing, value=IGNORED),
            index,
        )

    def _crop(self, labels: np.ndarray) -> tuple[int, int, int, int]:
        """The first of some random boxes in which no class has too large a share, or the last."""
        (height, width), side = labels.shape, self.data.crop_size
        for _ in range(_CROPS):
            top = random.randint(0, max(height - side, 0))
            left = random.randint(0, max(width - side, 0))
            right, bottom = min(left + side, width), min(top + side, height)
            counts = np.bincount(labels[top:bottom, left:right].ravel(), minlength=IGNORED + 1)
            counts = counts[:IGNORED]
            if self.data.largest_class_share == 1 or (
                counts.max() < self.data.largest_class_share * counts.sum()
            ):
                break
        return left, top, right, bottom


@dataclass(frozen=True)
class TestTransform:
    """A fixed size of the shorter side; the labels stay as they are.

    At test an image is predicted at its own size: logits are resized, never labels.
    """

    __test__ = False  # nothing that pytest collects

    statistics: Mapping[str, Sequence[float]]
    """Mean and standard deviation of the colours, by channel."""
    longer_side: int
    shorter_side: int

    def __call__(self, item: LabelledImage, index: int) -> LabelledTensors:
        """Return an image [3, h, w] resized to fit, and labels [H, W] as they were."""
        return LabelledTensors(self.image(item.image), torch.from_numpy(item.labels), index)

    def image(self, image: Image.Image) -> Tensor:
        """Return an RGB image as [3, h, w], resized to fit."""
        size = fitted(image.size, self.longer_side, self.shorter_side)
        resized = image.resize(size, Image.Resampling.BILINEAR)
        return normalise(vision.pil_to_tensor(resized), self.statistics)


def fitted(size: Sequence[int], longer_side: float, shorter_side: float) -> tuple[int, int]:
    """Return a size in whole pixels, its ratio kept: the shorter side as asked for, unless the
    longer one would exceed what is asked for it."""
    factor = min(longer_side / max(size), shorter_side / min(size))
    first, second = (max(int(side * factor + 0.5), 1) for side in size)
    return first, second


def _resized_part(
    image: Image.Image, size: tuple[int, int], part: tuple[int, int, int, int]
) -> Image.Image:
    """A box of an image resized to `size`, without resizing the rest of it."""
    left, top, right, bottom = part
    across, down = image.width / size[0], image.height / size[1]
    source = (left * across, top * down, right * across, bottom * down)
    return image.resize((right - left, bottom - top), Image.Resampling.BILINEAR, box=source)


def distorted(image: Image.Image, probability: float) -> Image.Image:
    """Return an image with its brightness, contrast, saturation and hue changed at random.

    Each is changed with `probability`: brightness by −32 to 32 of 255 levels, contrast and
    saturation by factors from 0.5 to 1.5, hue by −0.1 to 0.1 turns; contrast before or after the
    colours, as a coin falls. The ranges are those of SSD (Liu et al., 2016), as segmentation has
    them; saturation and hue are torchvision's.
    """
    if random.random() < probability:
        added = random.uniform(-_BRIGHTNESS, _BRIGHTNESS)
        image = image.point(lambda level: level + added)
    contrast_first = random.random() < 0.5
    factor = random.uniform(*_CONTRAST) if random.random() < probability else 1.0
    if contrast_first:
        image = image.point(lambda level: level * factor)
    if random.random() < probability:
        image = vision.adjust_saturation(image, random.uniform(*_SATURATION))
    if random.random() < probability:
        image = vision.adjust_hue(image, random.uniform(-_HUE, _HUE))
    if not contrast_first:
        image = image.point(lambda level: level * factor)
    return image
