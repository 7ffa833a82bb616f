"""Sizes of the parts of a dense model, by default the published ones; imports no PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

_MOST = {"box_resolution": 256, "mask_resolution": 256, "pool_scales": 256}
"""The largest side of what a head sees of each region or map."""
_MOST_OF_OTHERS = 65_536
"""More is a typing error."""


@dataclass(frozen=True, kw_only=True)
class DetectorSizes:
    """Mask R-CNN's parts as in mmdet's configuration for a ResNet-50 with a feature pyramid."""

    channels: int = 256
    """Width of the feature pyramid."""
    anchor_sizes: Sequence[int] = (32, 64, 128, 256, 512)
    """Side of the square anchors at strides 4, 8, 16, 32 and 64, in pixels."""
    anchor_ratios: Sequence[float] = (0.5, 1.0, 2.0)
    """Height over width of the anchors."""
    box_features: int = 1024
    """Width of the box head's two layers."""
    box_resolution: int = 7
    """Side of what the box head sees of a region."""
    mask_channels: Sequence[int] = (256, 256, 256, 256)
    """Widths of the mask head's convolutions."""
    mask_resolution: int = 14
    """Side of what the mask head sees of a region; its masks have twice that."""
    canonical_size: int = 224
    """Side in pixels of the regions that are pooled at stride 16 (FPN, Eq. 1)."""
    proposals: int = 1000
    """Of an image after the proposals' NMS."""
    sampled_regions: int = 512
    """Of an image in the loss of box and mask head, a quarter of them objects at most."""
    score_threshold: float = 0.05
    """Lowest score of a detection."""
    nms_threshold: float = 0.5
    """Largest IoU of two detections of one class."""
    detections: int = 100
    """Largest number per image. COCO's average precision counts at most 100 per image and class."""

    def __post_init__(self) -> None:
        _check(self, rates=("score_threshold", "nms_threshold"))
        if len(self.anchor_sizes) != 5:
            raise ValueError(
                f"anchor_sizes is {list(self.anchor_sizes)}; it must have 5 entries, one for each"
                " of the strides 4, 8, 16, 32 and 64"
            )


@dataclass(frozen=True, kw_only=True)
class SegmenterSizes:
    """UperNet's parts as in mmseg's configuration for a Swin Transformer."""

    channels: int = 512
    """Width of the head."""
    pool_scales: Sequence[int] = (1, 2, 3, 6)
    """Sides of the coarsest map's pooled versions."""
    auxiliary_channels: int = 256
    """Width of the auxiliary head, on the map of stride 16."""
    classifier_deviation: float = 0.01
    """Standard deviation of both classifiers' first weights. Larger ones begin with larger
    gradients below them, which a short run needs."""

    def __post_init__(self) -> None:
        _check(self, rates=("classifier_deviation",))


def _check(sizes: Any, rates: Sequence[str] = ()) -> None:
    for field in fields(sizes):
        value = getattr(sizes, field.name)
        if isinstance(field.default, tuple):
            if isinstance(value, str) or not isinstance(value, Sequence) or not value:
                raise TypeError(f"{field.name} is {value!r}; accepted: a list of numbers")
            entries = value
        else:
            entries = (value,)
        kind = Real if field.name in (*rates, "anchor_ratios") else Integral
        if any(isinstance(entry, bool) or not isinstance(entry, kind) for entry in entries):
            numbers = "numbers" if kind is Real else "whole numbers"
            raise TypeError(f"{field.name} is {value!r}; accepted: {numbers}")
        if field.name in rates:
            if not 0 <= value <= 1:
                raise ValueError(f"{field.name} is {value}; accepted: 0 to 1")
        else:
            most = _MOST.get(field.name, _MOST_OF_OTHERS)
            if not all(0 < entry <= most for entry in entries):
                raise ValueError(f"{field.name} is {value}; accepted: above 0, at most {most:,}")
