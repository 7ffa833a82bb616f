"""The spatial prior module of ViT-Adapter: a small convolutional pyramid beside the backbone."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn

from vision_ttt.layers.conv_stem import ConvNorm


class SpatialPrior(nn.Module):
    """Images [B, C, H, W] → tokens [B, h · w, D] at strides 4, 8, 16, 32 (ViT-Adapter, Sec. 3.3).

    A stem of three 3×3 convolutions, the first of stride 2, and a 3×3 max-pooling of stride 2, then
    three 3×3 convolutions of stride 2; each with BatchNorm and ReLU. A linear layer per stride
    projects to D channels.

    Args:
        in_chans: C.
        width: channels of the stem; those at strides 8, 16 and 32 are 2, 4 and 4 times it.
        dim: D.

    Initialisation: convolutions and projections normal with variance 2 / fan-out, biases zero.
    """

    def __init__(self, in_chans: int, width: int, dim: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            ConvNorm(in_chans, width, stride=2),
            ConvNorm(width, width),
            ConvNorm(width, width),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        widths = (width, 2 * width, 4 * width, 4 * width)
        self.stages = nn.ModuleList(
            ConvNorm(narrow, wide, stride=2) for narrow, wide in itertools.pairwise(widths)
        )
        self.projections = nn.ModuleList(nn.Linear(channels, dim) for channels in widths)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                fan_out = module.out_channels * math.prod(module.kernel_size)
                nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=math.sqrt(2 / dim))
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> list[Tensor]:
        """Four tensors of tokens, finest first; h and w are the image's sides over the stride."""
        # In this format, which a convolution passes on, tokens are a view of a map.
        x = self.stem(images.contiguous(memory_format=torch.channels_last))
        maps = [x]
        for stage in self.stages:
            maps.append(stage(maps[-1]))
        return [
            project(x.flatten(2).transpose(1, 2))
            for project, x in zip(self.projections, maps, strict=True)
        ]
