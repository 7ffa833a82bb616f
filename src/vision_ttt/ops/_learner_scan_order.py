"""Sequences whose heads scan them in two directions, and their mini-batches.

The last ``reverse_heads`` heads scan the tokens from T to 1. For them mini-batch [start, stop) in
scan order consists of the tokens T-1-start … T-stop, in that order; for the other heads, of start
… stop-1. Copies of mini-batches are never larger than one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def in_scan_order(x: Tensor, reverse: int) -> Tensor:
    """x [B, T, H, …] with the tokens of the last ``reverse`` of H reversed; its own inverse."""
    if not reverse:
        return x
    forward = x.shape[2] - reverse
    return torch.cat([x[:, :, :forward], x[:, :, forward:].flip(1)], dim=2)


def mini_batches(length: int, mini_batch_size: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each mini-batch in scan order; the last one may be short."""
    for start in range(0, length, mini_batch_size):
        yield start, min(start + mini_batch_size, length)


def take(x: Tensor, start: int, stop: int, reverse_heads: int) -> Tensor:
    """Tokens [start, stop) in scan order of x [B, T, H, ...], as [B, H, n, ...]."""
    if not reverse_heads:
        return x[:, start:stop].transpose(1, 2)
    length, forward_heads = x.shape[1], x.shape[2] - reverse_heads
    forward = x[:, start:stop, :forward_heads]
    backward = x[:, length - stop : length - start, forward_heads:].flip(1)
    return torch.cat([forward, backward], dim=2).transpose(1, 2)


def put(x: Tensor, piece: Tensor, start: int, stop: int, reverse_heads: int) -> None:
    """Write piece [B, H, n, ...] to tokens [start, stop) in scan order of x [B, T, H, ...]."""
    piece = piece.transpose(1, 2)
    if not reverse_heads:
        x[:, start:stop] = piece
        return
    length, forward_heads = x.shape[1], x.shape[2] - reverse_heads
    x[:, start:stop, :forward_heads] = piece[:, :, :forward_heads]
    x[:, length - stop : length - start, forward_heads:] = piece[:, :, forward_heads:].flip(1)
