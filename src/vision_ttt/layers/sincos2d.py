"""2-D sine-cosine position embedding of image tokens, which is not learned."""

from __future__ import annotations

import torch
from torch import Tensor

BASE = 10_000
"""Base of the geometric series of frequencies."""


def sincos_table(
    grid: tuple[int, int], channels: int, device: torch.device | None = None
) -> Tensor:
    """Sines and cosines of the positions p of tokens on a grid (h, w): [h · w, channels], float32.

    Tokens are row by row. The first half of the channels encodes the column, the second the row::

        [sin(p ω), cos(p ω)]    ω_i = 10000^(-i / (channels / 4)),  i = 0 … channels / 4 - 1

    Raises:
        ValueError: channels is not a multiple of 4.
    """
    if channels % 4:
        raise ValueError(f"2-D sines and cosines need a multiple of 4 channels, got {channels}")
    quarter = channels // 4
    # In float32 large angles lose digits; MPS has no float64.
    precise = torch.float32 if device is not None and device.type == "mps" else torch.float64
    omega = BASE ** (-torch.arange(quarter, device=device, dtype=precise) / quarter)

    def waves(length: int) -> Tensor:
        angles = torch.arange(length, device=device, dtype=precise)[:, None] * omega
        return torch.cat((angles.sin(), angles.cos()), dim=-1).float()  # [length, channels / 2]

    height, width = grid
    columns = waves(width)[None].expand(height, width, -1)
    rows = waves(height)[:, None].expand(height, width, -1)
    return torch.cat((columns, rows), dim=-1).flatten(0, 1)
