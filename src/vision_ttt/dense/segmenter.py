"""The class of each pixel: UperNet, or a linear layer on a backbone's tokens."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from vision_ttt.dense.model import DenseModel
from vision_ttt.dense.sizes import SegmenterSizes
from vision_ttt.extras import require
from vision_ttt.models.image_size import check_images

_AUXILIARY_MAP = 2
"""The map of stride 16."""


class Segmenter(DenseModel):
    """UperNet with an auxiliary fully convolutional head, of transformers' parts.

    Xiao et al., "Unified Perceptual Parsing for Scene Understanding", 2018. The head is mmseg's
    without its dropout.

    Initialisation: convolutions He-normal over outputs, classifiers normal with standard deviation
    ``sizes.classifier_deviation``, biases zero.

    Args:
        maps: a map module, see :class:`vision_ttt.dense.model.DenseModel`.
        num_classes: of pixels, at least 2.
        sizes: of the heads.

    Raises:
        MissingPackageError: transformers is not installed.
    """

    class_layers = ("head.classifier", "auxiliary_head.classifier")

    def __init__(
        self, maps: nn.Module, num_classes: int, sizes: SegmenterSizes | None = None
    ) -> None:
        super().__init__(maps)
        if num_classes < 2:
            raise ValueError(f"num_classes is {num_classes}; accepted: 2 and above")
        sizes = sizes or SegmenterSizes()
        self.num_classes = num_classes
        self.head, self.auxiliary_head = _make_heads(maps.channels, num_classes, sizes)
        self.pools_whole_map = 1 in sizes.pool_scales

    def forward(self, images: Tensor, auxiliary: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Logits [B, num_classes, H, W], float32, of images [B, C, H, W].

        Args:
            images: normalised, of any size.
            auxiliary: return the auxiliary head's logits, too, of the same shape.

        Raises:
            ValueError: the images' shape is another, e.g. C not the backbone's; in training, the
                batch is a single image.
        """
        size = check_images(images, self.in_chans, None)
        if self.training and self.head.training and self.pools_whole_map and len(images) == 1:
            raise ValueError(
                "training needs at least 2 images in a batch and process: a map pooled to 1 × 1"
                " has no variance for BatchNorm in one image"
            )
        maps = self.maps(images)
        logits = _upsampled(self.head(maps), size)
        return (logits, _upsampled(self.auxiliary_head(maps), size)) if auxiliary else logits


class LinearSegmenter(DenseModel):
    """Each token's class logits, by one linear layer, interpolated to pixels.

    The head of linear evaluation (DINOv2, Sec. 7.4): all that it segments by is in the tokens.

    Initialisation: the layer normal with standard deviation 0.02, its bias zero.

    Args:
        maps: a :class:`vision_ttt.dense.TokenMap`.
        num_classes: of pixels, at least 2.
    """

    class_layers = ("head",)

    def __init__(self, maps: nn.Module, num_classes: int) -> None:
        super().__init__(maps)
        if num_classes < 2:
            raise ValueError(f"num_classes is {num_classes}; accepted: 2 and above")
        self.num_classes = num_classes
        self.head = nn.Conv2d(maps.channels[0], num_classes, kernel_size=1)
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor, auxiliary: bool = False) -> Tensor | tuple[Tensor]:
        """Logits as of :meth:`Segmenter.forward`; with ``auxiliary`` alone in a tuple."""
        height, width = check_images(images, self.in_chans, None)
        (tokens,) = self.maps(images)
        (stride,) = self.maps.strides
        logits = F.interpolate(
            self.head(tokens).float(), scale_factor=stride, mode="bilinear", align_corners=False
        )[..., :height, :width]
        return (logits,) if auxiliary else logits


def _upsampled(logits: Tensor, size: Any) -> Tensor:
    return F.interpolate(logits.float(), size=size, mode="bilinear", align_corners=False)


def _make_heads(
    channels: tuple[int, ...], num_classes: int, sizes: SegmenterSizes
) -> tuple[nn.Module, nn.Module]:
    require("dense", "semantic segmentation")
    from transformers import UperNetConfig
    from transformers.models.upernet.modeling_upernet import UperNetFCNHead, UperNetHead

    config = UperNetConfig(
        num_labels=num_classes,
        hidden_size=sizes.channels,
        pool_scales=tuple(sizes.pool_scales),
        auxiliary_in_channels=channels[_AUXILIARY_MAP],
        auxiliary_channels=sizes.auxiliary_channels,
    )
    heads = (
        UperNetHead(config, channels),
        UperNetFCNHead(config, channels, in_index=_AUXILIARY_MAP),
    )
    for head in heads:
        for module in head.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.normal_(head.classifier.weight, std=sizes.classifier_deviation)
        nn.init.zeros_(head.classifier.bias)
    return heads
