"""Rows into which several documents are packed: each document is run as a row of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vision_ttt.language.padding import Padding
from vision_ttt.ops import states

BOUNDARIES = ("position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k")
"""Arguments of transformers' that say where the documents of a row begin."""


class Documents(NamedTuple):
    """Documents of rows [B, T], the longest of which has less than twice the tokens of any other.

    ``order`` [N, L] has the place of each of their tokens among the B · T. Behind the ``lengths``
    [N] it repeats a document's last token: nothing of another one is in its row.
    """

    order: Tensor
    lengths: Tensor


class Packing(NamedTuple):
    """Where the documents of rows [B, T] are.

    ``groups`` are documents of like lengths: all of them in one batch would be mostly padding.
    ``places`` [B, T] is where each token is among those of all groups, end to end, and ``last`` [B]
    is the place of each row's last document among the groups'.
    """

    groups: tuple[Documents, ...]
    places: Tensor
    last: Tensor

    @classmethod
    def of(cls, begins: Tensor, padding: Padding | None) -> Packing:
        """Of documents by their first tokens, as :func:`first_tokens` returns them."""
        rows, length = begins.shape
        begins = begins.clone()
        begins[:, 0] = True  # also of a row without tokens, whose one document has none
        document = begins.flatten().cumsum(0) - 1
        first = begins.flatten().nonzero().squeeze(1)
        real = torch.ones_like(begins) if padding is None else _real(padding)
        lengths = torch.zeros_like(first).index_add(0, document, real.flatten().to(first.dtype))
        alike: dict[int, list[int]] = {}
        for index, count in enumerate(lengths.tolist()):
            alike.setdefault(max(count - 1, 0).bit_length(), []).append(index)
        # Where a document is among all groups' documents, and its tokens among all groups' tokens.
        number, start, width = (torch.empty_like(first) for _ in range(3))
        groups, documents, tokens = [], 0, 0
        for indices in alike.values():
            index = torch.tensor(indices, device=first.device)
            count = lengths[index]
            longest = max(int(count.max()), 1)
            place = torch.arange(longest, device=first.device)
            last = (count - 1).clamp(min=0).unsqueeze(1)
            groups.append(Documents(first[index].unsqueeze(1) + torch.minimum(place, last), count))
            nth = torch.arange(len(indices), device=first.device)
            number[index] = documents + nth
            start[index] = tokens + nth * longest
            width[index] = longest
            documents += len(indices)
            tokens += len(indices) * longest
        place = torch.arange(rows * length, device=first.device) - first[document]
        places = start[document] + torch.minimum(place, width[document] - 1)
        return cls(
            tuple(groups),
            places.view(rows, length),
            number[document.view(rows, length)[:, -1]],
        )

    def run(self, block: Callable[..., Any], x: Tensor, return_state: bool) -> Any:
        """Return what a block gives for the documents of x [B, T, D], each as a row of its own.

        With ``return_state`` the state is that after the last document of each row.
        """
        tokens, outputs, after = x.flatten(0, 1), [], []
        for order, lengths in self.groups:
            y = block(tokens[order], None, return_state, lengths if return_state else None)
            if return_state:
                y, state = y
                after.append(state)
            outputs.append(y.flatten(0, 1))
        y = torch.cat(outputs)[self.places]
        return (y, states.select(states.concatenate(after), self.last)) if return_state else y


def first_tokens(
    tokens: Tensor, padding: Padding | None, boundaries: Mapping[str, Any]
) -> Tensor | None:
    """Where a row's further documents begin [B, T], None where each row is one document.

    Args:
        tokens: [B, T, …], of which the shape and the device count.
        padding: where their padding is, behind which the result has it.
        boundaries: what is given of :data:`BOUNDARIES`, and of other names, which are left out. A
            document begins where any of these says so.

    Raises:
        TypeError, ValueError: a boundary is no tensor of int32 or int64, or has another shape or
            range.
    """
    given = {name: boundaries[name] for name in BOUNDARIES if boundaries.get(name) is not None}
    begins = torch.zeros(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    for name, value in given.items():
        step = int(name == "position_ids")  # from a token of a document to the next one
        each = _per_token(name, value, tokens)
        if padding is not None:
            each = states.take(each, padding.order)
        begins[:, 1:] |= each.diff(dim=1) != step
    if given and padding is not None:
        begins &= _real(padding)
    return begins if given and begins.any() else None


def _real(padding: Padding) -> Tensor:
    """What is not padding [B, T], behind the tokens."""
    place = torch.arange(padding.order.shape[1], device=padding.order.device)
    return place < padding.lengths.unsqueeze(1)


def _per_token(name: str, value: Any, tokens: Tensor) -> Tensor:
    """A boundary by token [B, T]: positions, or numbers that change with the document."""
    if not isinstance(value, Tensor) or value.dtype not in (torch.int32, torch.int64):
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name} must be a tensor of int32 or int64, got {kind}")
    batch, length = tokens.shape[:2]
    if not name.startswith("cu_seq_lens"):
        if list(value.shape) not in ([batch, length], [1, length]):
            raise ValueError(f"{name} must have shape [{batch}, {length}], got {list(value.shape)}")
        return value.to(tokens.device).expand(batch, length)
    ends = value.flatten().tolist()
    if value.ndim != 1 or ends != sorted(ends) or (ends[:1], ends[-1:]) != ([0], [batch * length]):
        raise ValueError(
            f"{name} must rise from 0 to {batch * length}, the tokens of the call with padding, "
            f"got {ends}"
        )
    place = torch.arange(batch * length, device=tokens.device)
    return torch.bucketize(place, value.to(place), right=True).view(batch, length)
