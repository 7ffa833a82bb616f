"""Sequences in parts: the state of the learner ops between any two tokens.

A mini-batch that a part leaves open is kept as what it has summed so far, for each tensor θ of the
state Σ η_s ∂ℓ_s/∂θ', taken at θ' before the mini-batch. The next part goes on with θ', the sums and
their number of tokens m: the complete mini-batches of a part run on the op's backends, what is left
of a mini-batch at either end in its dual form in PyTorch, or without gradients on a CPU in the
kernels of :mod:`vision_ttt.ops._learner_part`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from vision_ttt.ops._backend import AUTO
from vision_ttt.ops._op import Op, autocast_kind

if TYPE_CHECKING:
    from vision_ttt.ops._learner_part import LearnerPart

Tensors = tuple[Tensor, ...]


class Opened(NamedTuple):
    """A mini-batch that may be open, m tokens in it: θ' and the sums, each [B, H, …].

    ``position`` is m, 0 ≤ m < b, or each sequence's m [B] where they differ.
    """

    start: Tensors
    sums: Tensors
    position: int | Tensor
    last: Tensors | None = None
    """θ after the last token, where it has been computed."""


class Part(NamedTuple):
    """Tokens of one mini-batch, as many of it as there are: q, k, v [B, H, n, d], η [B, H, n], and
    p of the tokens, [H or 1, n, 1], or [B, H or 1, 1, 1] where sequences are at different ones.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    eta: Tensor
    p: Tensor


_VIEWS = ("q", "k", "v", "eta")

OpenMiniBatch = Callable[[Part, Tensors, Tensors, Any], tuple[Tensor, Tensors]]
"""(tokens, θ', sums before them, the op's inputs) → o [B, H, n, d] and the sums after them."""


def run_learner(
    op: Op,
    inputs: Any,
    names: Sequence[str],
    kind: type[Any],
    state: Any,
    part: LearnerPart,
    backend: str | None,
    *,
    return_state: bool,
) -> Any:
    """Run a learner op on a sequence or on the next tokens of one.

    Args:
        op: the learner op.
        inputs: its arguments; the initial state among them is used where ``state`` is None.
        names: of the state's tensors among the inputs.
        kind: the state's type: the state after the last token, θ' and the sums, one field for each
            name, then the position. Of heads that scan in two directions it has the first alone.
        state: where the sequence is; None at its beginning.
        part: the op on a part of a mini-batch.
        backend: for the complete mini-batches. Where it is PyTorch's, the parts are so, too.
        return_state: whether the state after the last token is wanted.

    Returns:
        o [B, T, H, d], or (o, state) with ``return_state``.

    Raises:
        TypeError, ValueError: the inputs or the state do not fit, or a state is to go on with heads
            that scan from T to 1.
    """
    if state is None and not return_state:
        return op(inputs, backend, wanted=1)[0]
    if inputs.reverse_heads:
        if state is not None:
            raise ValueError(
                f"{op.name}: no state goes on with reverse_heads={inputs.reverse_heads}: a reverse"
                " head begins at the last token, so that it needs the whole sequence in one call"
            )
        o, *last = op(inputs, backend, wanted=None)
        return o, kind(*last)
    op.contract.check(inputs)
    # A backend that cannot serve is refused, complete mini-batches or not.
    may_use_kernels = op.choose(inputs, backend) in (AUTO, "cpu")
    opened = None if state is None else _opened(op.name, state, kind, inputs, names)
    if op.autocast and torch.is_autocast_enabled(autocast_kind(inputs.q)):
        inputs = op.cast(inputs)
    parts = Parts(op, inputs, names, part.mini_batch, backend)
    state_tensors = () if opened is None else (*opened.start, *opened.sums)
    if may_use_kernels and part.refusal(inputs, state_tensors) is None:
        parts.kernels = part
    o, opened = parts.run(opened, return_state)
    if opened is None:
        return o
    return o, kind(*parts.after(opened), *opened.start, *opened.sums, opened.position)


def _opened(op: str, state: Any, kind: type[Any], inputs: Any, names: Sequence[str]) -> Opened:
    """Return where a sequence is by its state, or raise an error where that does not fit."""
    if not isinstance(state, kind):
        raise TypeError(f"{op}: state must be a {kind.__name__}, got {type(state).__name__}")
    if state.position is None:
        raise ValueError(f"{op}: the state of heads that scan in two directions cannot go on")
    batch, _, heads, _ = inputs.q.shape
    count = len(names)
    for place, (field, x) in enumerate(zip(state._fields[count:-1], state[count:-1], strict=True)):
        rank = (2, 1)[place % 2]
        wanted = [batch, heads, *getattr(inputs, names[place % count]).shape[-rank:]]
        if list(x.shape) != wanted:
            raise ValueError(
                f"{op}: state.{field} must have shape {wanted}, as the inputs have, got "
                f"{list(x.shape)}"
            )
    position, size = state.position, inputs.mini_batch_size
    if isinstance(position, Tensor):
        if list(position.shape) != [batch] or position.is_floating_point():
            raise ValueError(
                f"{op}: state.position must be a whole number, or one for each sequence [{batch}], "
                f"got {position.dtype} {list(position.shape)}"
            )
    elif not 0 <= position < size:
        raise ValueError(
            f"{op}: state.position must be in 0 … {size - 1} with mini_batch_size={size}, got "
            f"{position}"
        )
    dtype = torch.promote_types(inputs.q.dtype, torch.float32)
    tensors = tuple(x.to(dtype) for x in state[count:-1])
    return Opened(tensors[:count], tensors[count:], position)


class Parts:
    """A call of a learner op on the next tokens of a sequence."""

    def __init__(
        self, op: Op, inputs: Any, names: Sequence[str], mini_batch: OpenMiniBatch, backend: Any
    ) -> None:
        self.op, self.inputs, self.names = op, inputs, names
        self.mini_batch, self.backend = mini_batch, backend
        self.kernels: LearnerPart | None = None
        """What goes through parts of mini-batches in place of ``mini_batch``."""
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
        """o [B, T, H, d], and where the sequence is then, if that is wanted."""
        if opened is not None and isinstance(opened.position, Tensor):
            outputs, opened = self._token_by_token(opened, return_state)
        else:
            outputs, opened = self._mini_batches(opened, return_state)
        o = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return o, opened if return_state else None

    def _mini_batches(
        self, opened: Opened | None, return_state: bool
    ) -> tuple[list[Tensor], Opened | None]:
        """What is left of the open mini-batch, then the complete ones, then a new open one."""
        length, outputs, done = self.inputs.q.shape[1], [], 0
        if opened is not None and opened.position:
            done = min(self.size - opened.position, length)
            o, opened = self.open(opened, 0, done, return_state or done < length)
            outputs.append(o)
        # Without a wish for the state, the last mini-batch may be short in the op's own call.
        stop = length - (length - done) % self.size if return_state else length
        if done < stop:
            initial = (getattr(self.inputs, name) for name in self.names)
            start = tuple(initial) if opened is None else opened.start
            o, *start = self._whole(start, done, stop, None if return_state else 1)
            outputs.append(o)
            opened = no_tokens(tuple(start)) if return_state else None
        if stop < length:
            if opened is None:
                opened = no_tokens(self._initial())
            o, opened = self.open(opened, stop, length, return_state)
            outputs.append(o)
        return outputs, opened

    def _token_by_token(self, opened: Opened, return_state: bool) -> tuple[list[Tensor], Opened]:
        """Every sequence at its own place of its mini-batch."""
        outputs, length = [], self.inputs.q.shape[1]
        for token in range(length):
            goes_on = return_state or token + 1 < length
            o, opened = self.open(opened, token, token + 1, goes_on)
            outputs.append(o)
        return outputs, opened

    def _whole(self, start: Tensors, first: int, last: int, wanted: int | None) -> Tensors:
        """Run the op on tokens of complete mini-batches: o and the state after them."""
        views = {name: getattr(self.inputs, name)[:, first:last] for name in "qkv"}
        state = dict(zip(self.names, start, strict=True))
        eta = self.inputs.eta[:, first:last]
        inputs = self.inputs._replace(**views, eta=eta, **state)
        return self.op(inputs, self.backend, wanted=wanted)

    def open(
        self, opened: Opened, first: int, last: int, goes_on: bool = True
    ) -> tuple[Tensor, Opened]:
        """Go through tokens of one mini-batch: o [B, n, H, d], and where the sequence is then.

        That need not be right where nothing ``goes_on`` from there.
        """
        inputs, n = self.inputs, last - first
        if self.kernels is not None:
            if n < inputs.q.shape[1]:
                views = {name: getattr(inputs, name)[:, first:last] for name in _VIEWS}
                inputs = inputs._replace(**views)
            return self.kernels.run(inputs, opened, goes_on)
        tokens = [x[:, first:last].transpose(1, 2).to(self.dtype) for x in inputs[:4]]
        position = opened.position
        if isinstance(position, Tensor):
            p = self.scale[:, position].transpose(0, 1)[:, :, None, None]  # [B, H or 1, 1, 1]
        else:
            p = self.scale[:, position : position + n].unsqueeze(-1)  # [H or 1, n, 1]
        with torch.autocast(autocast_kind(inputs.q), enabled=False):
            o, sums = self.mini_batch(Part(*tokens, p), opened.start, opened.sums, inputs)
        opened = self._close(Opened(opened.start, sums, position + n))
        return o.transpose(1, 2).to(inputs.q.dtype), opened

    def _close(self, opened: Opened) -> Opened:
        """Begin the next mini-batch where the last one is complete."""
        start, sums, position, _ = opened
        if isinstance(position, Tensor):
            full = position == self.size
            p = self.scale[:, -1]
            return Opened(
                tuple(
                    torch.where(_over(full, x), x - _over(p, x[0]) * s, x)
                    for x, s in zip(start, sums, strict=True)
                ),
                tuple(s.masked_fill(_over(full, s), 0) for s in sums),
                torch.where(full, 0, position),
            )
        if position < self.size:
            return opened
        after = zip(start, sums, strict=True)
        return no_tokens(tuple(x - _over(self.scale[:, -1], x[0]) * s for x, s in after))

    def _initial(self) -> Tensors:
        """The initial state of every sequence."""
        batch = self.inputs.q.shape[0]
        state = [getattr(self.inputs, name).to(self.dtype) for name in self.names]
        ranks = (3, 2) * (len(state) // 2)
        return tuple(
            x.expand(batch, *x.shape[-rank:]) for x, rank in zip(state, ranks, strict=True)
        )

    def after(self, opened: Opened) -> Tensors:
        """θ_T = θ' − p_m Σ, the state that the last token has seen."""
        start, sums, position, last = opened
        if last is not None:
            return last
        if isinstance(position, Tensor):
            # p_0 stands for any: the sums of an empty mini-batch are 0.
            p = self.scale[:, (position - 1).clamp(min=0)].transpose(0, 1)  # [B, H or 1]
            return tuple(
                x - p.reshape(*p.shape, *[1] * (x.ndim - 2)) * s
                for x, s in zip(start, sums, strict=True)
            )
        if position == 0:
            return start
        p = self.scale[:, position - 1]
        return tuple(x - _over(p, x[0]) * s for x, s in zip(start, sums, strict=True))


def no_tokens(start: Tensors) -> Opened:
    """A mini-batch without tokens. Its sums need no memory."""
    return Opened(start, tuple(x.new_zeros(()).expand_as(x) for x in start), 0)


def _over(x: Tensor, like: Tensor) -> Tensor:
    """x [n] or [1] with dimensions behind, to stand over the first dimension of another."""
    return x.reshape(-1, *[1] * (like.ndim - 1))
