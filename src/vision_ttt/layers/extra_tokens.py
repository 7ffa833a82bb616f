"""Learned tokens among the image's, such as class tokens and registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

PLACEMENTS: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    "head": lambda length, count: tuple(range(count)),
    "middle": lambda length, count: tuple(length // 2 + i for i in range(count)),
    "end": lambda length, count: tuple(length + i for i in range(count)),
    "double": lambda length, count: (0, length + 1),
    "even": lambda length, count: tuple(
        (i + 1) * (length // (count + 1)) + i for i in range(count)
    ),
}
"""Positions of n extra tokens in the sequence [T + n], ascending, as a function of T and n.

- "head", "middle", "end": side by side before the image tokens, in the middle or after them.
- "double": one before and one after (Vision-TTT, Table 4); n is 2.
- "even": each behind another ⌊T / (n + 1)⌋ image tokens, the remaining ones after the last
  (registers of Mamba-Reg).
"""


def split_extra(x: Tensor, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Split x [B, T + n, D] into the image tokens [B, T, D] and the n ≥ 1 at ascending positions.

    Parts are used and not an index: they cost next to nothing and leave T free under
    torch.compile. Their sizes are given, because those of slices are clamped, and a tracer takes
    minutes to compare the sums of many of them.
    """
    sizes, taken = [], 0
    for position in positions:
        sizes += [position - taken, 1]
        taken = position + 1
    parts = x.split([*sizes, x.shape[1] - taken], dim=1)
    return torch.cat(parts[::2], dim=1), torch.cat(parts[1::2], dim=1)


def merge_extra(x: Tensor, extra: Tensor, positions: Sequence[int]) -> Tensor:
    """Undo :func:`split_extra`: x [B, T, D] with extra [B, n, D] at ascending positions."""
    starts = [position - index for index, position in enumerate(positions)]
    ends = [*starts, x.shape[1]]
    sizes = [end - start for start, end in zip([0, *starts], ends, strict=True)]
    parts = x.split(sizes, dim=1)
    pieces = [parts[0]]
    for index in range(len(positions)):
        pieces += [extra[:, index : index + 1], parts[index + 1]]
    return torch.cat(pieces, dim=1)


class ExtraTokens(nn.Module):
    """Insert n learned tokens into a sequence of image tokens, and extract them again.

    Args:
        dim: D.
        placement: a key of :data:`PLACEMENTS`.
        count: n; by default 1, or 2 for "double".
        pos_embed: add a learned position to each token, as in models whose position embedding
            covers the whole sequence (Vim, Mamba-Reg).

    Initialisation: normal with standard deviation 0.02.

    Raises:
        ValueError: the placement is unknown, or it does not support the count.
    """

    def __init__(
        self, dim: int, placement: str, count: int | None = None, *, pos_embed: bool = False
    ) -> None:
        super().__init__()
        if placement not in PLACEMENTS:
            raise ValueError(f"placement must be one of {list(PLACEMENTS)}, got {placement!r}")
        if count is None:
            count = 2 if placement == "double" else 1
        if count < 1 or (placement == "double" and count != 2):
            accepted = "2" if placement == "double" else "at least 1"
            raise ValueError(f"count of {placement!r} must be {accepted}, got {count}")
        self.placement = placement
        self.count = count
        self.tokens = nn.Parameter(torch.empty(1, count, dim))
        nn.init.trunc_normal_(self.tokens, std=0.02)
        self.pos_embed = None
        if pos_embed:
            self.pos_embed = nn.Parameter(torch.empty(1, count, dim))
            nn.init.trunc_normal_(self.pos_embed, std=0.02)

    def no_weight_decay(self) -> set[str]:
        """All parameters."""
        return {name for name, _ in self.named_parameters()}

    def positions(self, length: int) -> tuple[int, ...]:
        """Positions in the sequence that ``length`` image tokens become part of, ascending."""
        return PLACEMENTS[self.placement](length, self.count)

    def prepared(self) -> Tensor:
        """The tokens [1, n, D] as they are inserted, with their positions."""
        return self.tokens if self.pos_embed is None else self.tokens + self.pos_embed

    def insert(self, x: Tensor) -> Tensor:
        """x [B, T, D] → [B, T + n, D]."""
        tokens = self.prepared().expand(x.shape[0], -1, -1)
        return merge_extra(x, tokens, self.positions(x.shape[1]))

    def extract(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T + n, D] → the image tokens [B, T, D] and the extra ones [B, n, D]."""
        return split_extra(x, self.positions(x.shape[1] - self.count))

    def extra_repr(self) -> str:
        return f"placement={self.placement!r}, count={self.count}"
