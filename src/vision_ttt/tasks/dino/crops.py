"""The crops of an image that student and teacher see: random ones, and those of the test loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightly.transforms import DINOViewTransform
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2.functional import resized_crop

from vision_ttt.tasks.dino.config import DinoSection
from vision_ttt.tasks.images.config import ImageData

_JITTERED = 0.8  # share of crops whose colours are varied
_BLURRED = (1.0, 0.1, 0.5)  # shares of the first and second global crops and of local ones


@dataclass(frozen=True)
class MultiCrop:
    """Makes two global crops [2, 3, H, W] of a picture, and local ones [n, 3, h, w] if any."""

    views: Sequence[Callable[[Image.Image], Tensor]]
    """Of the first and the second global crop, and of local ones."""
    count: int
    """Of local crops."""

    def __call__(self, picture: Image.Image) -> tuple[Tensor, ...]:
        first, second, local = self.views
        crops = (torch.stack([first(picture), second(picture)]),)
        if self.count:
            crops += (torch.stack([local(picture) for _ in range(self.count)]),)
        return crops


def multi_crop(
    own: DinoSection, data: ImageData, shown: Mapping[str, Any], local_side: int
) -> MultiCrop:
    """Return the crops of training, augmented as DINO's by lightly.

    Args:
        shown: timm's data config, of which size, mean and std are used.
        local_side: height and width of local crops.
    """

    def view(number: int) -> DINOViewTransform:
        is_local = number == 2
        return DINOViewTransform(
            crop_size=(local_side, local_side) if is_local else tuple(shown["input_size"][1:]),
            crop_scale=(own.local_scale, own.global_scale) if is_local else (own.global_scale, 1.0),
            hf_prob=data.horizontal_flip,
            cj_prob=_JITTERED if data.color_jitter else 0.0,
            cj_strength=data.color_jitter,
            **{"cj_bright": 1.0, "cj_contrast": 1.0, "cj_sat": 0.5, "cj_hue": 0.25},
            gaussian_blur=_BLURRED[number],
            sigmas=(0.1, own.blur),
            solarization_prob=own.solarize if number == 1 else 0.0,
            normalize={key: list(shown[key]) for key in ("mean", "std")},
        )

    return MultiCrop([view(number) for number in range(3)], own.local_crops)


def fixed_crops(images: Tensor, side: int, own: DinoSection) -> list[Tensor]:
    """Images [B, 3, H, W] → the crops that the test loss is of: always the same, and not augmented.

    They are the whole image and its middle [B, 2, 3, H, W], and where there are local crops the
    four corners [B, 4, 3, side, side], of the mean areas of the crops in training.
    """
    height, width = images.shape[-2:]

    def part(area: float, down: float, right: float, size: list[int]) -> Tensor:
        h, w = (max(1, round(length * area**0.5)) for length in (height, width))
        top, left = round(down * (height - h)), round(right * (width - w))
        return resized_crop(images, top, left, h, w, size)

    middle = part((own.global_scale + 1) / 2, 0.5, 0.5, [height, width])
    crops = [torch.stack([images, middle], dim=1)]
    if own.local_crops:
        area = (own.local_scale + own.global_scale) / 2
        corners = [part(area, down, right, [side, side]) for down in (0, 1) for right in (0, 1)]
        crops.append(torch.stack(corners, dim=1))
    return crops
