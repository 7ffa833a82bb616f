"""The pieces of a learner op's call: the rest of an open mini-batch, complete ones, a new open one.

If a call leaves a mini-batch open, its state holds θ' from before the mini-batch, the number of
tokens m in it, and for each tensor θ the sum Σ η_s ∂ℓ_s/∂θ' over these tokens. The next call
continues from this state. Complete mini-batches run on the op's backends. Incomplete ones at either
end run in the dual form in PyTorch or, without gradients, in the kernels of the op of
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


VIEWS = ("q", "k", "v", "eta")
"""The tensors of a learner op that hold tokens."""

Views = dict[str, Tensor]
"""q, k, v [B, n, H, d] and η [B, n, H] of some tokens, by these names."""


class Parts:
    """A call of a learner op on the next tokens of a sequence.

    Args:
        op: the learner op.
        inputs: its arguments.
        backend: the backend that is requested for complete mini-batches.
        kernels: the op that processes parts of mini-batches; None for PyTorch's operations.
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
            scale = self.inputs.q.new_ones(1, dtype=self.dtype).expand(self.size)
        return scale.to(self.dtype).reshape(-1, self.size)

    def run(self, opened: Opened | None, return_state: bool) -> tuple[Tensor, Opened | None]:
        """Process all tokens of sequences at one position.

        The order is the rest of the open mini-batch, the complete ones, and a new open one.

        Returns:
            o [B, T, H, d], and the open mini-batch after the tokens.
        """
        length, outputs, done = self.inputs.q.shape[1], [], 0
        if opened is not None and opened.position:
            done = min(self.size - opened.position, length)
            o, opened = self.open(opened, 0, done, return_state or done < length)
            outputs.append(o)
        # If no state is returned, the op's own call includes a short last mini-batch.
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
        """Process tokens of one mini-batch in PyTorch: o [B, n, H, d], and the sums after them."""
        tokens = [views[name].transpose(1, 2).to(self.dtype) for name in VIEWS]
        x = self.inputs
        norm = InnerNorm.of(x.ln_weight, x.ln_bias, x.eps, self.dtype)
        with torch.autocast(autocast_kind(x.q), enabled=False):
            o, sums = mini_batch(Part(*tokens, p), opened.start, opened.sums, norm)
        return o.transpose(1, 2).to(x.q.dtype), sums

    def views(self, of: Callable[[Tensor], Tensor]) -> Views:
        """q, k, v and η of some tokens."""
        return {name: of(getattr(self.inputs, name)) for name in VIEWS}

    def open(
        self, opened: Opened, first: int, last: int, goes_on: bool = True
    ) -> tuple[Tensor, Opened]:
        """Process tokens of one mini-batch: o [B, n, H, d], and the open mini-batch after them.

        Without ``goes_on`` nothing continues from that mini-batch, and it may be wrong.
        """
        inputs, n = self.inputs, last - first
        whole = n == inputs.q.shape[1]
        views = self.views(lambda x: x if whole else x[:, first:last])
        if self.kernels is not None:
            return self._by_kernels(views, opened, goes_on)
        position = opened.position
        if isinstance(position, Tensor):
            opened = begun(opened)
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

        A returned state must not change when the parameters do, so this is a copy. All sequences
        share it.
        """
        state = [x.to(self.dtype, copy=True) for x in initial_state(self.inputs)]
        return no_tokens(with_batch(state, self.inputs.q.shape[0]))

    def last_state(self, opened: Opened) -> Tensors:
        """θ_T = θ' − p_m Σ, the state that the last token has seen."""
        start, sums, position, last = opened
        if last is not None:
            return last
        if isinstance(position, Tensor):
            # The sums of an empty mini-batch are 0, so any p gives the same result.
            return after(start, sums, self.scale[:, (position - 1).clamp(min=0)].transpose(0, 1))
        return start if position == 0 else after(start, sums, self.scale[:, position - 1])


def no_tokens(start: Tensors) -> Opened:
    """A mini-batch without tokens. Its sums need no memory."""
    return Opened(start, tuple(x.new_zeros(()).expand_as(x) for x in start), 0)


def begun(opened: Opened) -> Opened:
    """Set the sums of mini-batches without tokens to 0. Kernels do not read them."""
    empty = opened.position == 0
    return opened._replace(sums=tuple(s.masked_fill(_over(empty, s.ndim), 0) for s in opened.sums))


def _over(x: Tensor, rank: int) -> Tensor:
    """x [B] as [B, 1, …] of a rank, to broadcast along the first dimension of a tensor."""
    return x.reshape(-1, *[1] * (rank - 1))
