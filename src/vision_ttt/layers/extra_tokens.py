"""Learned tokens beside the image's: where they stand, how they get in and out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

PLACEMENTS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "head": lambda length: (0,),
    "middle": lambda length: (length // 2,),
    "double": lambda length: (0, length + 1),
}
"""For T image tokens, where the extra ones stand in the longer sequence (Vision-TTT, Table 4)."""


def split_extra(x: Tensor, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Part x [B, T + n, D] into the tokens elsewhere [B, T, D] and those at n positions [B, n, D].

    Slices, not an index: they cost next to nothing and leave T free under torch.compile.
    """
    pieces, taken = [], 0
    for position in positions:
        pieces.append(x[:, taken:position])
        taken = position + 1
    rest = torch.cat([*pieces, x[:, taken:]], dim=1)
    return rest, torch.cat([x[:, position : position + 1] for position in positions], dim=1)


def merge_extra(x: Tensor, extra: Tensor, positions: Sequence[int]) -> Tensor:
    """Undo :func:`split_extra`: extra [B, n, D] at ``positions``, ascending, among x [B, T, D]."""
    pieces, taken = [], 0
    for index, position in enumerate(positions):
        pieces += [x[:, taken : position - index], extra[:, index : index + 1]]
        taken = position - index
    return torch.cat([*pieces, x[:, taken:]], dim=1)


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
        tokens = self.tokens.expand(x.shape[0], -1, -1)
        return merge_extra(x, tokens, self.positions(x.shape[1]))

    def extract(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T + n, D] → the image tokens [B, T, D] and the extra ones [B, n, D]."""
        return split_extra(x, self.positions(x.shape[1] - self.tokens.shape[1]))
