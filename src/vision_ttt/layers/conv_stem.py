"""Convolutions of hierarchical backbones: the stem and the reduction of the resolution."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class ConvNorm(nn.Module):
    """Convolution without bias, BatchNorm and, unless ``relu=False``, ReLU on maps [B, C, h, w]."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 3,
        *,
        stride: int = 1,
        relu: bool = True,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(
            in_channels, out_channels, kernel_size, stride, padding=kernel_size // 2, bias=False
        )
        self.norm = nn.BatchNorm2d(out_channels)
        self.relu = relu

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x))
        return F.relu(x) if self.relu else x


class ConvStem(nn.Sequential):
    """Embed images [B, in_chans, H, W] as maps [B, dim, H/4, W/4], sides rounded up.

    Four 3×3 convolutions, the first and the last with stride 2 and the last 4 dim wide, then a
    1×1 convolution.
    """

    def __init__(self, in_chans: int, dim: int) -> None:
        hidden = dim // 2
        super().__init__(
            ConvNorm(in_chans, hidden, stride=2),
            ConvNorm(hidden, hidden),
            ConvNorm(hidden, hidden),
            ConvNorm(hidden, 4 * dim, stride=2),
            ConvNorm(4 * dim, dim, 1, relu=False),
        )


class Downsample(nn.Module):
    """Maps [B, dim, h, w] → [B, out_dim, h/2, w/2], sides rounded up: an inverted bottleneck.

    1×1 convolution to 4 out_dim channels, ReLU, depth-wise 3×3 convolution with stride 2, ReLU, 1×1
    convolution, each with bias, and BatchNorm.
    """

    def __init__(self, dim: int, out_dim: int) -> None:
        super().__init__()
        hidden = 4 * out_dim
        self.expand = nn.Conv2d(dim, hidden, 1)
        self.spatial = nn.Conv2d(hidden, hidden, 3, stride=2, padding=1, groups=hidden)
        self.reduce = nn.Conv2d(hidden, out_dim, 1)
        self.norm = nn.BatchNorm2d(out_dim)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.spatial(F.relu(self.expand(x))))
        return self.norm(self.reduce(x))
