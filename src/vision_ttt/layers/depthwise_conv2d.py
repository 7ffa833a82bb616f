"""Depth-wise convolution of image tokens on their grid."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vision_ttt.layers.extra_tokens import merge_extra, split_extra
from vision_ttt.layers.grid import check_grid
from vision_ttt.ops import depthwise_conv2d

torch.fx.wrap("check_grid")


class DepthwiseConv2d(nn.Conv2d):
    """Depth-wise convolution, without bias, of tokens [B, T, C] laid out as a grid (h, w).

    Tokens outside the grid (class tokens, registers), given by their positions in the sequence,
    are neither read nor convolved: their output is zero.

    Args:
        channels: C.
        kernel_size: taps per side, an odd number.

    Raises:
        ValueError: the kernel size is even.
    """

    def __init__(self, channels: int, kernel_size: int = 3) -> None:
        if kernel_size % 2 == 0:
            raise ValueError(f"kernel_size must be odd, got {kernel_size}")
        super().__init__(
            channels, channels, kernel_size, padding=kernel_size // 2, groups=channels, bias=False
        )

    def forward(self, x: Tensor, grid: tuple[int, int], extra: Sequence[int] = ()) -> Tensor:
        """Convolve.

        Args:
            x: tokens [B, T, C] with T = h · w + len(extra).
            grid: (h, w), rows and columns of tokens.
            extra: positions in the sequence of the tokens outside the grid, ascending from 0.

        Raises:
            ValueError: T does not fit the grid.
        """
        check_grid(x.shape[1], grid, len(extra))
        if not extra:
            return depthwise_conv2d(x, self.weight, grid)
        image, others = split_extra(x, extra)
        return merge_extra(
            depthwise_conv2d(image, self.weight, grid), torch.zeros_like(others), extra
        )
