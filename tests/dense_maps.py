"""Map modules and targets that tests of dense models share; nano sizes."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_ttt.models.h_vit3 import HViT3

NANO_H_VIT3 = {"dims": (8, 16, 16, 24), "depths": (1, 1, 2, 1), "num_heads": (1, 2, 2, 3)}

NANO_DETECTOR = {
    "channels": 16,
    "anchor_sizes": [8, 16, 32, 64, 128],
    "box_features": 32,
    "mask_channels": [16, 16],
    "canonical_size": 56,
    "proposals": 50,
    "sampled_regions": 32,
}

NANO_SEGMENTER = {"channels": 16, "auxiliary_channels": 8}


class ConvBackbone(nn.Module):
    """Four strided convolutions, each a layer."""

    def __init__(self, channels: tuple[int, ...]) -> None:
        super().__init__()
        strides = (4, 2, 2, 2)
        self.blocks = nn.ModuleList(
            nn.Conv2d(before, after, 2 * stride - 1, stride, stride - 1)
            for before, after, stride in zip((3, *channels), channels, strides, strict=False)
        )

    def group_matcher(self, coarse: bool = False) -> dict[str, str]:
        return {"blocks": r"^blocks\.(\d+)"}


class ConvMaps(nn.Module):
    """A map module of convolutions: no maps of the library's own."""

    strides = (4, 8, 16, 32)

    def __init__(self, channels: tuple[int, ...] = (8, 12, 16, 20)) -> None:
        super().__init__()
        self.channels = channels
        self.backbone = ConvBackbone(channels)

    def forward(self, images: Tensor) -> list[Tensor]:
        maps = []
        for block in self.backbone.blocks:
            images = F.relu(block(images))
            maps.append(images)
        return maps


def nano_h_vit3(**arguments: object) -> HViT3:
    return HViT3(**{"num_classes": 0, **NANO_H_VIT3, **arguments})


def target(size: tuple[int, int], *boxes: tuple[int, int, int, int]) -> dict[str, Tensor]:
    """A target of boxes in whole pixels, whose masks fill them, with labels 1, 2, …."""
    masks = torch.zeros(len(boxes), *size, dtype=torch.uint8)
    for mask, (x0, y0, x1, y1) in zip(masks, boxes, strict=True):
        mask[y0:y1, x0:x1] = 1
    return {
        "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        "labels": torch.arange(1, len(boxes) + 1),
        "masks": masks,
    }
