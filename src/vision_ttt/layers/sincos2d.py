"""A fixed position embedding of image tokens by sines and cosines."""

from __future__ import annotations

import torch
from torch import Tensor

BASE = 10_000


def sincos_table(
    grid: tuple[int, int], channels: int, device: torch.device | None = None
) -> Tensor:
    """Sines and cosines of the tokens' places on a grid (h, w): [h · w, channels], float32.

    Tokens are row by row. Of the channels the first half tells the column, the second the row::

        [sin(p ω), cos(p ω)]    ω_i = 10000^(-i / (channels / 4)),  i = 0 … channels / 4 - 1

    Raises:
        ValueError: channels is not a multiple of 4.
    """
    if channels % 4:
        raise ValueError(f"2-D sines and cosines need a multiple of 4 channels, got {channels}")
    quarter = channels // 4
    # Angles of far tokens lose digits in float32, so they are computed in float64 where there is.
    precise = torch.float32 if device is not None and device.type == "mps" else torch.float64
    omega = BASE ** (-torch.arange(quarter, device=device, dtype=precise) / quarter)

    def waves(length: int) -> Tensor:
        angles = torch.arange(length, device=device, dtype=precise)[:, None] * omega
        return torch.cat((angles.sin(), angles.cos()), dim=-1).float()  # [length, channels / 2]

    height, width = grid
    columns = waves(width)[None].expand(height, width, -1)
    rows = waves(height)[:, None].expand(height, width, -1)
    return torch.cat((columns, rows), dim=-1).flatten(0, 1)
