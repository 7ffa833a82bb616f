"""The pieces of a call of a learner op: what is left of a mini-batch, complete ones, an open one.

A mini-batch that a call leaves open is kept as what it has summed so far, for each tensor θ of the
state Σ η_s ∂ℓ_s/∂θ', taken at θ' before the mini-batch. The next call goes on with θ', the sums and
their number of tokens m. Complete mini-batches run on the op's backends, what is left of one at
either end in its dual form in PyTorch, or without gradients in the kernels of the op of
:mod:`vision_ttt.ops._learner_part`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vision_ttt.ops._backend import autocast_kind
from vision_ttt.ops._learner_dual import Part, Tensors, after, initial_state, mini_batch, with_batch
from vision_ttt.ops._learner_inner_model import InnerNorm
from vision_ttt.ops._op import Op


class Opened(NamedTuple):
    """A mini-batch that may be open, m tokens in it: θ' and the sums, each [B, H, …].

    ``position`` is m, 0 ≤ m < b, or each sequence's m [B] where they differ.
    """

    start: Tensors
    sums: Tensors
    position: int | Tensor
    last: Tensors | None = None
    """θ after the last token, where it has been computed."""


_VIEWS = ("q", "k", "v", "eta")

Views = dict[str, Tensor]
"""q, k, v [B, n, H, d] and η [B, n, H] of some tokens, by these names."""


class Parts:
    """A call of a learner op on the next tokens of a sequence.

    Args:
        op: the learner op.
        inputs: its arguments.
        backend: what is requested for the complete mini-batches.
        kernels: the op that goes through parts of mini-batches in place of PyTorch.
    """

    def __init__(self, op: Op, inputs: Any, backend: Any, kernels: Op | None = None) -> None:
        self.op, self.inputs, self.backend, self.kernels = op, inputs, backend, kernels
        self.names = op.inputs._fields[4:-6]
        self.size = inputs.mini_batch_size
        self.dtype = torch.promote_types(inputs.q.dtype, torch.float32)

    # Not cached: torch.compile does not enter functools.cached_property.
    @property
    def scale(self) -> Tensor:
        """p [H or 1, b]."""
        scale = self.inputs.position_scale
        if scale is None:
            scale = self.inputs.q.new_ones(self.size, dtype=self.dtype)
        return scale.to(self.dtype).reshape(-1, self.size)

    def run(self, opened: Opened | None, return_state: bool) -> tuple[Tensor, Opened | None]:
        """Go through all tokens of sequences at one place: o [B, T, H, d], and where they are then.

        First what is left of the open mini-batch, then the complete ones, then a new open one.
        """
        length, outputs, done = self.inputs.q.shape[1], [], 0
        if opened is not None and opened.position:
            done = min(self.size - opened.position, length)
            o, opened = self.open(opened, 0, done, return_state or done < length)
            outputs.append(o)
        # Without a wish for the state, the last mini-batch may be short in the op's own call.
        stop = length - (length - done) % self.size if return_state else length
        if done < stop:
            start = initial_state(self.inputs) if opened is None else opened.start
            views = self.views(lambda x: x[:, done:stop])
            o, *start = self.whole(views, start, None if return_state else 1)
            outputs.append(o)
            opened = no_tokens(tuple(start)) if return_state else None
        if stop < length:
            if opened is None:
                opened = self.beginning()
            o, opened = self.open(opened, stop, length, return_state)
            outputs.append(o)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1), opened

    def whole(self, views: Views, start: Tensors, wanted: int | None = None) -> Tensors:
        """Run the op on tokens of complete mini-batches: o and the state after them."""
        inputs = self.inputs._replace(**views, **dict(zip(self.names, start, strict=True)))
        return self.op(inputs, self.backend, wanted=wanted)

    def dual(self, views: Views, p: Tensor, opened: Opened) -> tuple[Tensor, Tensors]:
        """Go through tokens of one mini-batch in PyTorch: o [B, n, H, d], and the sums after it."""
        tokens = [views[name].transpose(1, 2).to(self.dtype) for name in _VIEWS]
        x = self.inputs
        norm = InnerNorm.of(x.ln_weight, x.ln_bias, x.eps, self.dtype)
        with torch.autocast(autocast_kind(x.q), enabled=False):
            o, sums = mini_batch(Part(*tokens, p), opened.start, opened.sums, norm)
        return o.transpose(1, 2).to(x.q.dtype), sums

    def views(self, of: Callable[[Tensor], Tensor]) -> Views:
        """q, k, v and η of some tokens."""
        return {name: of(getattr(self.inputs, name)) for name in _VIEWS}

    def open(
        self, opened: Opened, first: int, last: int, goes_on: bool = True
    ) -> tuple[Tensor, Opened]:
        """Go through tokens of one mini-batch: o [B, n, H, d], and where the sequence is then.

        That need not be right where nothing ``goes_on`` from there.
        """
        inputs, n = self.inputs, last - first
        whole = n == inputs.q.shape[1]
        views = self.views(lambda x: x if whole else x[:, first:last])
        if self.kernels is not None:
            return self._by_kernels(views, opened, goes_on)
        position = opened.position
        if isinstance(position, Tensor):
            p = self.scale[:, position].transpose(0, 1)[:, :, None, None]  # [B, H or 1, 1, 1]
        else:
            p = self.scale[:, position : position + n].unsqueeze(-1)  # [H or 1, n, 1]
        o, sums = self.dual(views, p, opened)
        return o, self.close(Opened(opened.start, sums, position + n))

    def _by_kernels(self, views: Views, opened: Opened, goes_on: bool) -> tuple[Tensor, Opened]:
        start, sums, position, _ = opened
        each = isinstance(position, Tensor)
        places = (position.to(torch.int64).contiguous(), 0) if each else (None, position)
        others, count = self.inputs[-6:-3], len(start)
        tensors = *views.values(), *start, *others, *sums
        options = self.size, self.inputs.eps, goes_on
        o, *states = self.kernels(self.kernels.inputs(*tensors, *places, *options), self.backend)
        if not goes_on:
            return o, opened
        last, sums, following = (tuple(states[i * count : (i + 1) * count]) for i in range(3))
        if each:
            position = position + 1
            full = position == self.size
            return o, Opened(following, sums, position.masked_fill(full, 0), last)
        if not sums:
            return o, no_tokens(last)
        return o, Opened(start, sums, position + views["q"].shape[1], last)

    def close(self, opened: Opened) -> Opened:
        """Begin the next mini-batch where the last one is complete."""
        start, sums, position, _ = opened
        if isinstance(position, Tensor):
            full = position == self.size
            moved = zip(start, after(start, sums, self.scale[:, -1]), strict=True)
            return Opened(
                tuple(torch.where(_over(full, x.ndim), y, x) for x, y in moved),
                tuple(s.masked_fill(_over(full, s.ndim), 0) for s in sums),
                torch.where(full, 0, position),
            )
        if position < self.size:
            return opened
        return no_tokens(after(start, sums, self.scale[:, -1]))

    def beginning(self) -> Opened:
        """Every sequence at its initial state, for a call that returns a state.

        That shall not change with the parameters, so that it is a copy, one for all sequences.
        """
        state = [x.to(self.dtype, copy=True) for x in initial_state(self.inputs)]
        return no_tokens(with_batch(state, self.inputs.q.shape[0]))

    def last_state(self, opened: Opened) -> Tensors:
        """θ_T = θ' − p_m Σ, the state that the last token has seen."""
        start, sums, position, last = opened
        if last is not None:
            return last
        if isinstance(position, Tensor):
            # p_0 stands for any: the sums of an empty mini-batch are 0.
            return after(start, sums, self.scale[:, (position - 1).clamp(min=0)].transpose(0, 1))
        return start if position == 0 else after(start, sums, self.scale[:, position - 1])


def no_tokens(start: Tensors) -> Opened:
    """A mini-batch without tokens. Its sums need no memory."""
    return Opened(start, tuple(x.new_zeros(()).expand_as(x) for x in start), 0)


def _over(x: Tensor, rank: int) -> Tensor:
    """x [B] with dimensions behind, to stand over the first dimension of a tensor of a rank."""
    return x.reshape(-1, *[1] * (rank - 1))
