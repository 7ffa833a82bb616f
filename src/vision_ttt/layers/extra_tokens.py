"""Learned tokens beside the image's: where they stand, how they get in and out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

PLACEMENTS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "head": lambda length: (0,),
    "middle": lambda length: (length // 2,),
    "double": lambda length: (0, length + 1),
}
"""For T image tokens, where the extra ones stand in the longer sequence (Vision-TTT, Table 4)."""


class ExtraTokens(nn.Module):
    """Insert learned class tokens into a sequence of image tokens, and read them back.

    Args:
        dim: D.
        placement: "head" (before the image), "middle", or "double" (one before, one after).

    Initialisation: normal with standard deviation 0.02.

    Raises:
        ValueError: the placement is not one of these.
    """

    def __init__(self, dim: int, placement: str) -> None:
        super().__init__()
        if placement not in PLACEMENTS:
            raise ValueError(f"placement must be one of {sorted(PLACEMENTS)}, got {placement!r}")
        self.placement = placement
        self.tokens = nn.Parameter(torch.empty(1, len(self.positions(1)), dim))
        nn.init.trunc_normal_(self.tokens, std=0.02)

    def positions(self, length: int) -> tuple[int, ...]:
        """Where the tokens stand in the sequence that ``length`` image tokens become part of."""
        return PLACEMENTS[self.placement](length)

    def insert(self, x: Tensor) -> Tensor:
        """x [B, T, D] → [B, T + n, D]."""
        pieces, taken = [], 0
        tokens = self.tokens.expand(x.shape[0], -1, -1).unbind(1)
        for index, (position, token) in enumerate(
            zip(self.positions(x.shape[1]), tokens, strict=True)
        ):
            pieces += [x[:, taken : position - index], token.unsqueeze(1)]
            taken = position - index
        return torch.cat([*pieces, x[:, taken:]], dim=1)

    def extract(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T + n, D] → the image tokens [B, T, D] and the extra ones [B, n, D]."""
        total = x.shape[1]
        positions = self.positions(total - self.tokens.shape[1])
        image = [t for t in range(total) if t not in positions]
        pick = [torch.tensor(index, device=x.device) for index in (image, positions)]
        return x.index_select(1, pick[0]), x.index_select(1, pick[1])
