"""A batch of sequences that are at different places of their mini-batches, or of several lengths.

No step has a shape that depends on a place or a length: torch.compile sees one graph. With m tokens
in its open mini-batch of b, a sequence is gone through in three pieces:

1. its open mini-batch, b slots of which the first m are blank;
2. the complete mini-batches behind it;
3. the tokens behind these, fewer than b.

Blanks, and tokens of another piece or of padding, have η = 0: nothing is learnt from them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vision_ttt.ops._learner_mini_batches import Opened, Parts, Tensors, Views, no_tokens
from vision_ttt.ops.states import take


def check_lengths(op: str, lengths: Tensor, inputs: Any) -> None:
    """Refuse lengths that are not whole numbers from 0 to T, one for each sequence.

    Raises:
        TypeError, ValueError: as above, or heads scan from T to 1.
    """
    batch, length = inputs.q.shape[:2]
    # Narrower numbers would overflow, unsigned ones below 0, where places are computed.
    if not isinstance(lengths, Tensor) or lengths.dtype not in (torch.int32, torch.int64):
        kind = lengths.dtype if isinstance(lengths, Tensor) else type(lengths).__name__
        raise TypeError(f"{op}: lengths must be a tensor of int32 or int64, got {kind}")
    if list(lengths.shape) != [batch]:
        raise ValueError(f"{op}: lengths must have shape [{batch}], got {list(lengths.shape)}")
    if inputs.reverse_heads:
        raise ValueError(
            f"{op}: reverse_heads={inputs.reverse_heads}, which begin at the last token, have no"
            " lengths: give each sequence alone"
        )
    _check_range(f"{op}: lengths", lengths, length)


def _check_range(what: str, values: Tensor, last: int) -> None:
    """Refuse values beyond 0 … last; on a CPU only, and not while torch.compile traces."""
    if torch.compiler.is_compiling() or values.device.type != "cpu":
        return
    if not all(0 <= value <= last for value in values.tolist()):
        raise ValueError(f"{what} must be in 0 … {last}, got {values.tolist()}")


def run_lengths(parts: Parts, opened: Opened | None, lengths: Tensor) -> tuple[Tensor, Opened]:
    """o [B, T, H, d], and where each sequence is after its tokens.

    Args:
        parts: the call.
        opened: where the sequences are, at one place or at several; None at their beginning.
        lengths: tokens of each [B]; what is behind them is padding, whose o is of no meaning.
    """
    size, length = parts.size, parts.inputs.q.shape[1]
    places = first = torch.zeros_like(lengths)  # first: the token that the second piece begins at
    outputs, blanks = [], 0
    if opened is None:
        opened = parts.beginning()._replace(position=places)
    else:
        if isinstance(opened.position, Tensor):
            _check_range(f"{parts.op.name}: positions", opened.position, size - 1)
        places = first + opened.position
        o, sums = _piece(parts, opened, -places, size, lengths)
        filled = (places + lengths).clamp(max=size)
        opened = parts.close(Opened(opened.start, sums, filled))
        first, blanks = size - places, size
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
        o, sums = _piece(parts, no_tokens(opened.start), first + complete, size - 1, lengths)
        # A sequence leaves one mini-batch open, the first one or this: the other's sums are 0.
        sums = tuple(x + y for x, y in zip(opened.sums, sums, strict=True))
        opened = opened._replace(sums=sums, position=opened.position + rest - complete)
        outputs.append(o)
    token = torch.arange(length, device=first.device)
    behind = token - first.unsqueeze(1)
    end = complete.unsqueeze(1)
    index = blanks + torch.where(behind < end, behind, room + behind - end)
    if blanks:
        index = torch.where(behind < 0, token + places.unsqueeze(1), index)
    return take(torch.cat(outputs, dim=1), index), opened


def _piece(
    parts: Parts, opened: Opened, first: Tensor, count: int, lengths: Tensor
) -> tuple[Tensor, Tensors]:
    """o [B, n, H, d] of the first n slots of a mini-batch, and its sums after them.

    The slots are of the tokens from ``first`` [B] on; those that there are not are blank.
    """
    index = first.unsqueeze(1) + torch.arange(count, device=first.device)
    views = _views(parts, index, (index >= 0) & (index < lengths.unsqueeze(1)))
    return parts.dual(views, parts.scale[:, :count].unsqueeze(-1), opened)


def _views(parts: Parts, index: Tensor, learnt: Tensor) -> Views:
    """Tokens by index [B, n], with rates of 0 where they are not to be learnt from."""
    views = parts.views(lambda x: take(x, index))
    return {**views, "eta": views["eta"].masked_fill(~learnt.unsqueeze(-1), 0)}
