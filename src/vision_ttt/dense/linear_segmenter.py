"""The class of each pixel by a linear layer on a backbone's tokens."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from vision_ttt.dense.model import DenseModel


class LinearSegmenter(DenseModel):
    """Each token's class logits, by one linear layer, interpolated to pixels.

    The head of linear evaluation (DINOv2, Sec. 7.4): all that it segments by is in the tokens.

    Initialisation: the layer normal with standard deviation 0.02, its bias zero.

    Args:
        maps: a :class:`vision_ttt.dense.TokenMap`.
        num_classes: of pixels.

    Raises:
        ValueError: ``num_classes`` is below 2.
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
        """Logits [B, num_classes, H, W], float32, of images [B, 3, H, W].

        Args:
            images: normalised, of any size.
            auxiliary: return a tuple, of these logits alone: there is no auxiliary head.

        Raises:
            ValueError: the images' shape is another.
        """
        if images.ndim != 4 or images.shape[1] != 3:
            raise ValueError(f"images must be [B, 3, H, W], got {list(images.shape)}")
        (tokens,) = self.maps(images)
        height, width = images.shape[-2:]
        (stride,) = self.maps.strides
        logits = F.interpolate(
            self.head(tokens).float(), scale_factor=stride, mode="bilinear", align_corners=False
        )[..., :height, :width]
        return (logits,) if auxiliary else logits
