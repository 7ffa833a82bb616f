"""Depth-wise convolution along the sequence, causal in each channel's scan direction."""

from __future__ import annotations

from torch import Tensor, nn

from vision_ttt.ops import directional_conv1d


class DirectionalConv1d(nn.Conv1d):
    """Depth-wise Conv1d on tokens [B, T, C] → [B, T, C] that never looks ahead.

    A token sees itself and the ``kernel_size`` - 1 tokens before it in scan order. The last
    ``reverse_channels`` channels scan from T to 1, so "before" is to their right: their kernels
    are applied mirrored, and the sequence itself is never flipped.
    """

    def __init__(self, channels: int, kernel_size: int = 4, reverse_channels: int = 0) -> None:
        if not 0 <= reverse_channels <= channels:
            raise ValueError(f"reverse_channels must be in 0 … {channels}, got {reverse_channels}")
        super().__init__(channels, channels, kernel_size, groups=channels)
        self.reverse_channels = reverse_channels

    def forward(self, x: Tensor) -> Tensor:
        return directional_conv1d(x, self.weight, self.bias, self.reverse_channels)
