"""Runs sequences that have different lengths, or different positions in their mini-batches.

No shape depends on a position or a length, so torch.compile sees one graph. A sequence with m
tokens in its open mini-batch of b is processed in three pieces:

1. the tokens that complete its open mini-batch, at most b - m;
2. the complete mini-batches behind it;
3. the tokens behind these, fewer than b.

In each piece, tokens of another piece or of padding have η = 0: nothing is learnt from them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vision_ttt.ops._learner_dual import Tensors
from vision_ttt.ops._learner_mini_batches import Opened, Parts, Views, begun, no_tokens
from vision_ttt.ops.padding import fill_padding, padding_of
from vision_ttt.ops.states import take


def fill_views(op: str, lengths: Tensor, inputs: Any) -> tuple[Any, Tensor | None]:
    """Return the inputs with q = k = v = 1 and η = 0 at the padding, and the padding [B, T].

    Zeros would leave z = b, and where b is constant the inner norm has no derivative if eps is 0.

    Raises:
        TypeError, ValueError: as of :func:`vision_ttt.ops.padding.padding_of`.
    """
    padding = padding_of(op, lengths, inputs.q)
    filled = {name: fill_padding(getattr(inputs, name), padding, 1) for name in ("q", "k", "v")}
    return inputs._replace(**filled, eta=fill_padding(inputs.eta, padding)), padding


def turn(x: Tensor, lengths: Tensor, heads: int) -> Tensor:
    """Reverse the tokens of each sequence in x [B, T, H, …], for the last ``heads`` heads only.

    Heads that scan from T to 1 then begin at the last token of their sequence. Padding stays in
    place.
    """
    token = torch.arange(x.shape[1], device=x.device)
    last = lengths.unsqueeze(1) - 1
    forth, back = x.tensor_split([x.shape[2] - heads], dim=2)
    return torch.cat([forth, take(back, torch.where(token > last, token, last - token))], dim=2)


def run_lengths(parts: Parts, opened: Opened | None, lengths: Tensor) -> tuple[Tensor, Opened]:
    """Compute o [B, T, H, d], and the open mini-batch of each sequence after its tokens.

    Args:
        parts: the call.
        opened: the open mini-batch of each sequence, at one position or at several; None at the
            beginning of the sequences.
        lengths: [B], the number of tokens of each sequence. The rest is padding, which
            :func:`fill_views` has filled; o is arbitrary there.
    """
    size, length = parts.size, parts.inputs.q.shape[1]
    # int64, because b may be beyond int32. first: the token that the second piece begins at.
    places = first = torch.zeros_like(lengths, dtype=torch.int64)
    outputs, before = [], 0
    if opened is None:
        opened = parts.beginning()._replace(position=places)
    else:
        places = first + opened.position
        opened = begun(opened._replace(position=places))
        before = min(size, length)
        slots = places.unsqueeze(1) + torch.arange(before, device=first.device)
        p = parts.scale[:, slots.clamp(max=size - 1)].transpose(0, 1)  # [B, H or 1, n]
        o, sums = _piece(parts, opened, first, p, lengths.minimum(size - places))
        filled = (places + lengths).clamp(max=size)
        opened = parts.close(Opened(opened.start, sums, filled))
        first = size - places
        outputs.append(o)
    rest = (lengths - first).clamp(min=0)
    complete = rest // size * size
    room = length // size * size
    if room:
        index = first.unsqueeze(1) + torch.arange(room, device=first.device)
        views = _views(parts, index, index < (first + complete).unsqueeze(1))
        o, *start = parts.whole(views, opened.start)
        opened = opened._replace(start=tuple(start))
        outputs.append(o)
    if size > 1:
        p = parts.scale[:, : min(size - 1, length)]
        o, sums = _piece(parts, no_tokens(opened.start), first + complete, p, lengths)
        # A sequence leaves only one of two mini-batches open, the first one or this one. The sums
        # of the other are 0.
        sums = tuple(x + y for x, y in zip(opened.sums, sums, strict=True))
        opened = opened._replace(sums=sums, position=opened.position + rest - complete)
        outputs.append(o)
    token = torch.arange(length, device=first.device)
    behind = token - first.unsqueeze(1)
    end = complete.unsqueeze(1)
    index = before + torch.where(behind < end, behind, room + behind - end)
    if before:
        index = torch.where(behind < 0, token, index)
    return take(torch.cat(outputs, dim=1), index), opened


def _piece(
    parts: Parts, opened: Opened, first: Tensor, p: Tensor, end: Tensor
) -> tuple[Tensor, Tensors]:
    """Compute o [B, n, H, d] of n tokens in one mini-batch, and its sums after them.

    The tokens begin at ``first`` [B]; those from ``end`` [B] on are not learnt from. ``p`` is their
    position scale, [H or 1, n] or [B, H or 1, n].
    """
    index = first.unsqueeze(1) + torch.arange(p.shape[-1], device=first.device)
    views = _views(parts, index, index < end.unsqueeze(1))
    return parts.dual(views, p.unsqueeze(-1), opened)


def _views(parts: Parts, index: Tensor, learnt: Tensor) -> Views:
    """Tokens by index [B, n], with rates of 0 where they are not to be learnt from."""
    views = parts.views(lambda x: take(x, index))
    return {**views, "eta": views["eta"].masked_fill(~learnt.unsqueeze(-1), 0)}
