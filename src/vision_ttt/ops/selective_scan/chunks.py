"""Chunks of tokens, at whose beginnings the forward pass saves the state for the backward pass."""

from __future__ import annotations

CHUNK_TOKENS = 64
"""Tokens between two saved states: N numbers per 64 tokens and channel, a quarter of u for N = 16.

The kernels in csrc/scans/selective_scan have the same number.
"""


def num_chunks(length: int) -> int:
    """The number of saved states of a sequence, the initial one among them.

    State i is the one before a channel's tokens 64 i … 64 i + 63 in its own scan order.
    """
    return -(-length // CHUNK_TOKENS)
