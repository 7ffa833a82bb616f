"""Loops over a sequence in PyTorch's own operations, for programs that run without this package.

Such a loop is a ``scan``, which is part of the graph, so that the number of tokens may be dynamic.
A Python loop would be unrolled for one length and silently wrong for all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import CodeType
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import reset_code
from torch._higher_order_ops import scan

State = tuple[Tensor, ...]


def graph_loop(
    step: Callable[[State, Sequence[Tensor]], tuple[State, Tensor]],
    beginning: State,
    inputs: Sequence[Tensor],
) -> tuple[State, Tensor]:
    """Compute the last state, and the outputs of all steps [S, …].

    Args:
        step: (state, each input's slice) → (next state, output). It must create dimensions of size
            1 itself: the scan treats those of its inputs as dynamic.
        beginning: the state before the first step, no view of another tensor.
        inputs: [S, …] each, detached as the beginning is: the scan is for inference only.
    """
    if not torch.compiler.is_dynamo_compiling():
        _forget_traced_loops()
    # After a scan of another op, PyTorch would turn constants of the code into dynamic inputs.
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        return scan(step, beginning, tuple(inputs))


def _forget_traced_loops() -> None:
    """Remove what Dynamo keeps of earlier scans.

    Dynamo would compare the fixed sizes of an earlier scan with dynamic sizes, and fix these, too.
    """
    for code in scan.__code__.co_consts:
        if isinstance(code, CodeType):
            reset_code(code)


def detached(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors detached from autograd."""
    return tuple(None if x is None else x.detach() for x in tensors)


class MiniBatchRows(NamedTuple):
    """Where the tokens of a tensor [B, T, H, …] are in its mini-batches [N, B, H, b, …].

    Both index tensors hold row numbers. Selecting rows is one operation of a runtime; reversing,
    padding and transposing would be three. A short last mini-batch repeats its last token.
    """

    taken: Tensor
    """[N, B, H, b], the row of each place of the mini-batches among the rows [B T H] of tokens."""
    inverse: Tensor
    """[B, T, H], the row of each token among the rows [N B H b] of the mini-batches."""
    filled: Tensor
    """[N, 1, 1, b], whether a place holds a token, and not a repetition."""

    @classmethod
    def of(cls, x: Tensor, size: int, reverse_heads: int) -> MiniBatchRows:
        """For mini-batches of ``size`` tokens of x [B, T, H, …] in scan order."""
        (batch, length, heads), device = x.shape[:3], x.device
        count = (length + size - 1) // size
        sequence = torch.arange(batch, device=device).view(batch, 1, 1)
        head = torch.arange(heads, device=device)
        backward = head >= heads - reverse_heads
        place = torch.arange(count * size, device=device).view(count, 1, 1, size)
        token = place.clamp(max=length - 1)
        token = torch.where(backward.view(heads, 1), length - 1 - token, token)  # [N, 1, H, b]
        taken = (sequence * length + token) * heads + head.view(heads, 1)
        place_of = torch.arange(length, device=device).view(length, 1)
        place_of = torch.where(backward, length - 1 - place_of, place_of)  # [T, H]
        before = (place_of // size * batch + sequence) * heads + head
        return cls(taken, before * size + place_of % size, place < length)

    def mini_batches(self, x: Tensor) -> Tensor:
        """x [B, T, H, …] as [N, B, H, b, …]."""
        return _select(x.flatten(0, 2), self.taken)

    def sequence(self, x: Tensor) -> Tensor:
        """x [N, B, H, b, …] as [B, T, H, …]."""
        return _select(x.flatten(0, 3), self.inverse)


def _select(rows: Tensor, index: Tensor) -> Tensor:
    return rows.index_select(0, index.flatten()).reshape(*index.shape, *rows.shape[1:])
