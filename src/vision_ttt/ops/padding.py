"""Padding behind the tokens of sequences of several lengths: no value there reaches a result.

A learning rate or a gradient of 0 does not suffice, because 0 · NaN and 0 · ∞ are NaN. Values are
therefore replaced before any arithmetic, and autograd replaces their gradients in the same way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vision_ttt.ops._contract import check_range, check_whole_numbers


def padding_of(op: str, lengths: Tensor | None, x: Tensor) -> Tensor | None:
    """Return the mask [B, T] that is True at the padding of x [B, T, …]; None without lengths.

    Args:
        op: the op's or layer's public name, for messages.
        lengths: number of tokens of each sequence [B].
        x: the tokens.

    Raises:
        TypeError, ValueError: the lengths are not whole numbers from 0 to T, one for each sequence,
            or not on the tokens' device.
    """
    if lengths is None:
        return None
    check_whole_numbers(op, "lengths", lengths, x)
    check_range(op, "lengths", lengths, x.shape[1])
    token = torch.arange(x.shape[1], device=lengths.device)
    return token >= lengths.unsqueeze(1)


def fill_padding(x: Tensor, padding: Tensor | None, value: float = 0) -> Tensor:
    """Return x [B, T, …] with a value at the padding [B, T]; its gradient there is 0.

    Without padding, None, x itself is returned.
    """
    if padding is None:
        return x
    padding = padding.reshape(*padding.shape, *[1] * (x.ndim - 2))
    return x.masked_fill(padding, value)
