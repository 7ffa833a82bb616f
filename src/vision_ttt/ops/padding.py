"""Padding behind the tokens of sequences of several lengths: no value there reaches a result.

A learning rate or a gradient of 0 does not suffice, because 0 · NaN and 0 · ∞ are NaN. Values are
therefore replaced before any arithmetic, and autograd replaces their gradients in the same way.
"""

from __future__ import annotations

import torch
from torch import Tensor


def padding_of(op: str, lengths: Tensor | None, x: Tensor) -> Tensor | None:
    """Return the mask [B, T] that is True at the padding of x [B, T, …]; None without lengths.

    Args:
        op: the op's or layer's public name, for messages.
        lengths: number of tokens of each sequence [B].
        x: the tokens.

    Raises:
        TypeError, ValueError: the lengths are not whole numbers from 0 to T, one for each sequence.
    """
    if lengths is None:
        return None
    batch, length = x.shape[:2]
    # Narrower numbers would overflow, unsigned ones below 0, where places are computed.
    if not isinstance(lengths, Tensor) or lengths.dtype not in (torch.int32, torch.int64):
        kind = lengths.dtype if isinstance(lengths, Tensor) else type(lengths).__name__
        raise TypeError(f"{op}: lengths must be a tensor of int32 or int64, got {kind}")
    if list(lengths.shape) != [batch]:
        raise ValueError(f"{op}: lengths must have shape [{batch}], got {list(lengths.shape)}")
    check_range(f"{op}: lengths", lengths, length)
    token = torch.arange(length, device=lengths.device)
    return token >= lengths.unsqueeze(1)


def check_range(what: str, values: Tensor, last: int) -> None:
    """Refuse values beyond 0 … last; on a CPU only, and not while torch.compile traces."""
    if torch.compiler.is_compiling() or values.device.type != "cpu":
        return
    if not all(0 <= value <= last for value in values.tolist()):
        raise ValueError(f"{what} must be in 0 … {last}, got {values.tolist()}")


def fill_padding(x: Tensor, padding: Tensor | None, value: float = 0) -> Tensor:
    """Return x [B, T, …] with a value at the padding [B, T]; its gradient there is 0.

    Without padding, None, x itself is returned.
    """
    if padding is None:
        return x
    padding = padding.to(x.device).reshape(*padding.shape, *[1] * (x.ndim - 2))
    return x.masked_fill(padding, value)
