"""Depth-wise convolution along the sequence, causal in each channel's scan direction."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
        past = self.kernel_size[0] - 1
        split = self.out_channels - self.reverse_channels
        x = x.transpose(1, 2)  # [B, C, T]

        def convolve(x: Tensor, weight: Tensor, bias: Tensor, padding: tuple[int, int]) -> Tensor:
            return F.conv1d(F.pad(x, padding), weight, bias, groups=len(bias))

        parts = []
        if split:
            parts.append(convolve(x[:, :split], self.weight[:split], self.bias[:split], (past, 0)))
        if self.reverse_channels:
            mirrored = self.weight[split:].flip(-1)
            parts.append(convolve(x[:, split:], mirrored, self.bias[split:], (0, past)))
        return torch.cat([part.transpose(1, 2) for part in parts], dim=-1)
