"""A depth-wise convolution of image tokens with its residual."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vision_ttt.layers.depthwise_conv2d import DepthwiseConv2d
from vision_ttt.layers.grid import check_grid
from vision_ttt.ops import residual_depthwise_conv2d

torch.fx.wrap("check_grid")


class ResidualConv2d(DepthwiseConv2d):
    """x + DWConv3×3(x), with bias, of tokens [B, T, C] on a grid (h, w).

    Before a token mixer this is a conditional position encoding: zero padding makes its output
    depend on the distance to the edges, on a grid of any size.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels, kernel_size=3)
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Convolve and add.

        Raises:
            ValueError: T is not h · w.
        """
        check_grid(x.shape[1], grid)
        return residual_depthwise_conv2d(x, self.weight, grid) + self.bias
