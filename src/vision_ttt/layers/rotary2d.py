"""2-D rotary position embedding (RoPE) of image tokens."""

from __future__ import annotations

import torch
from torch import Tensor

BASE = 10_000
"""Base of the geometric series of frequencies."""


def rotary_table(
    grid: tuple[int, int], channels: int, device: torch.device | None = None
) -> Tensor:
    """Cosines and sines of 2-D RoPE on a grid (h, w): [h · w, channels / 2, 2], float32.

    The rotation angle of channel pair i of the first half is ``row · θ_i``, that of pair i of the
    second half ``column · θ_i``, with ``θ_i = 10000^(-i / (channels / 4))``.

    Raises:
        ValueError: channels is not a multiple of 4.
    """
    if channels % 4:
        raise ValueError(f"2-D RoPE needs a multiple of 4 channels, got {channels}")
    pairs = torch.arange(channels // 4, device=device, dtype=torch.float32)
    theta = BASE ** (-pairs / (channels // 4))

    def rotations(length: int) -> Tensor:
        angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * theta
        return torch.stack((angles.cos(), angles.sin()), dim=-1)  # [length, channels / 4, 2]

    height, width = grid
    rows = rotations(height)[:, None].expand(height, width, -1, -1)
    columns = rotations(width)[None].expand(height, width, -1, -1)
    return torch.cat((rows, columns), dim=2).flatten(0, 1)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate each pair of adjacent channels of x [..., T, C] by its angle; result in x's dtype.

    Args:
        x: tokens.
        table: [T, C / 2, 2] of :func:`rotary_table`; the rotation is computed in its precision.
    """
    cos, sin = table.unbind(-1)
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2).to(x.dtype)
