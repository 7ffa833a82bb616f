"""Batches of sequences of several lengths: which tokens there are, and who runs together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vision_ttt.language.block import TTTBlockState
from vision_ttt.ops import states


class Group(NamedTuple):
    """Rows [n] of a batch whose tokens are those from ``start`` to before ``stop``."""

    rows: Tensor
    start: int
    stop: int


def groups(mask: Tensor, *, begun: bool, return_state: bool) -> list[Group]:
    """The rows of equal padding.

    A token sees no later ones: padding on the right is left out only where the state after the last
    token is wanted.

    Args:
        mask: [B, T], 1 for tokens and 0 for padding before or behind them.
        begun: whether the rows have had tokens before.
        return_state: whether the states after the last tokens are wanted.

    Raises:
        ValueError: a row has no token, or padding between its tokens, also those of earlier calls.
    """
    real = mask != 0
    length = real.shape[1]
    counts = real.sum(1)
    starts = real.int().argmax(1)
    stops = length - real.flip(1).int().argmax(1)
    rows_at: dict[tuple[int, int], list[int]] = {}
    spans = zip(starts.tolist(), stops.tolist(), counts.tolist(), strict=True)
    for row, (start, stop, count) in enumerate(spans):
        if count == 0:
            raise ValueError(f"attention_mask: row {row} has no token")
        if count != stop - start or (begun and start):
            raise ValueError(f"attention_mask: row {row} has padding between its tokens")
        rows_at.setdefault((start, stop if return_state else length), []).append(row)
    return [Group(torch.tensor(rows, device=mask.device), *span) for span, rows in rows_at.items()]


def joined(parts: Sequence[Tensor], of: Sequence[Group], length: int) -> Tensor:
    """Outputs of groups [n, stop - start, D] at their places of a batch [B, T, D], 0 elsewhere."""
    first = parts[0]
    whole = first.new_zeros(sum(map(len, parts)), length, first.shape[-1])
    for part, (rows, start, stop) in zip(parts, of, strict=True):
        whole[rows, start:stop] = part
    return whole


def joined_states(parts: Sequence[TTTBlockState], of: Sequence[Group]) -> TTTBlockState:
    """States of groups as that of the batch."""
    order = torch.cat([group.rows for group in of])
    return states.concatenate(parts).select(order.argsort())
