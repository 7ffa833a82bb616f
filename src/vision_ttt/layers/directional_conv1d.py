"""Depth-wise convolution along the sequence, causal in each channel's scan direction."""

from __future__ import annotations

from torch import Tensor, nn

from vision_ttt.ops import directional_conv1d


class DirectionalConv1d(nn.Conv1d):
    """Depth-wise causal Conv1d with bias on tokens [B, T, C] → [B, T, C].

    The output of a token depends on itself and on the ``kernel_size`` - 1 tokens before it in scan
    order. The last ``reverse_channels`` channels scan from T to 1; their kernels are applied
    mirrored, and the sequence is not flipped.

    Args:
        channels: C.
        kernel_size: taps.
        reverse_channels: how many of the last channels scan from T to 1.

    Raises:
        ValueError: reverse_channels is not in 0 … C.
    """

    def __init__(self, channels: int, kernel_size: int = 4, reverse_channels: int = 0) -> None:
        if not 0 <= reverse_channels <= channels:
            raise ValueError(f"reverse_channels must be in 0 … {channels}, got {reverse_channels}")
        super().__init__(channels, channels, kernel_size, groups=channels)
        self.reverse_channels = reverse_channels

    def forward(self, x: Tensor) -> Tensor:
        return directional_conv1d(x, self.weight, self.bias, self.reverse_channels)
