"""Sequences in parts: the state of the learner ops between any two tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vision_ttt.ops._backend import AUTO, autocast_kind
from vision_ttt.ops._contract import Contract, check_range
from vision_ttt.ops._dispatcher_bypass import needs_gradient
from vision_ttt.ops._learner_lengths import fill_views, run_lengths, turn
from vision_ttt.ops._learner_mini_batches import VIEWS, Opened, Parts
from vision_ttt.ops._op import Op
from vision_ttt.ops.padding import fill_padding


def run_learner(
    op: Op,
    part: Op,
    contract: Contract,
    kind: type[Any],
    inputs: Any,
    state: Any,
    backend: str | None,
    *,
    return_state: bool,
    lengths: Tensor | None = None,
) -> Any:
    """Run a learner op on a sequence or on the next tokens of one.

    Args:
        op: the learner op.
        part: the op on a part of a mini-batch.
        contract: the checks on the arguments where there is a state.
        kind: the type of a state. Its fields are the tensors of the state after the last token, of
            θ' and of the sums, and the position. With heads that scan in two directions, only the
            state after the last token is set.
        inputs: the arguments; the initial state among them is used where ``state`` is None.
        state: the state after the tokens before these; None at the beginning of the sequence.
        backend: for the complete mini-batches. If it is PyTorch's, parts of mini-batches run in
            PyTorch, too.
        return_state: whether to return the state after the last token.
        lengths: [B], the number of tokens of each sequence. The returned state is the one after
            them. Values behind them are not read, and o is 0 there.

    Returns:
        o [B, T, H, d], or (o, state) with ``return_state``.

    Raises:
        TypeError, ValueError: the inputs or the state do not fit, or a state is given to heads that
            scan from T to 1.
    """
    padding = None
    if lengths is not None:
        op.contract.check(inputs)
        inputs, padding = fill_views(op.name, lengths, inputs)
        if inputs.reverse_heads and state is None:
            heads = inputs.reverse_heads
            turned = {name: turn(getattr(inputs, name), lengths, heads) for name in VIEWS}
            o = run_learner(
                *(op, part, contract, kind, inputs._replace(**turned, reverse_heads=0)),
                *(None, backend),
                return_state=return_state,
                lengths=lengths,
            )
            if not return_state:
                return turn(o, lengths, heads)
            o, last = o
            return turn(o, lengths, heads), kind(*last[: _count(last)])
    if state is None and not return_state:
        return fill_padding(op(inputs, backend, wanted=1)[0], padding)
    if inputs.reverse_heads:
        if state is not None:
            raise ValueError(
                f"{op.name}: a call with reverse_heads={inputs.reverse_heads} does not accept a"
                " state: a reverse head begins at the last token and needs the whole sequence"
            )
        o, *last = op(inputs, backend, wanted=None)
        return o, kind(*last)
    if state is None:
        op.contract.check(inputs)
        opened = None
    else:
        opened = _opened(op.name, state, kind, inputs, contract)
    # A backend that does not support the call raises an error, even without complete mini-batches.
    chosen = op.choose(inputs, backend)
    if op.autocast and torch.is_autocast_enabled(autocast_kind(inputs.q)):
        inputs = op.cast(inputs)
    state_tensors = () if opened is None else (*opened.start, *opened.sums)
    may_use_kernels = not needs_gradient((*inputs, *state_tensors)) and any(
        chosen in (AUTO, name) and kernels.refusal(inputs) is None
        for name, kernels in part.backends.items()
    )
    parts = Parts(op, inputs, backend, part if may_use_kernels else None)
    length = inputs.q.shape[1]
    each = opened is not None and isinstance(opened.position, Tensor)
    if each and length == 1 and lengths is None:
        o, opened = parts.open(opened, 0, 1, return_state)
    elif each or lengths is not None:
        if lengths is None:
            lengths = torch.full_like(opened.position, length)
        o, opened = run_lengths(parts, opened, lengths)
        o = fill_padding(o, padding)
    else:
        o, opened = parts.run(opened, return_state)
    if not return_state:
        return o
    return o, kind(*parts.last_state(opened), *opened.start, *opened.sums, opened.position)


def _opened(op: str, state: Any, kind: type[Any], inputs: Any, contract: Contract) -> Opened:
    """Return the open mini-batch of a state, or raise an error if the state does not fit."""
    if not isinstance(state, kind):
        raise TypeError(f"{op}: state must be a {kind.__name__}, got {type(state).__name__}")
    if state.position is None:
        raise ValueError(f"{op}: the state of heads that scan in two directions cannot go on")
    count = _count(state)
    tensors, position = state[count:-1], state.position
    for field, x in zip(state._fields[count:-1], tensors, strict=True):
        if x is None:
            raise ValueError(f"{op}: state.{field} is missing: the state cannot go on")
    contract.check((*inputs[:-3], *tensors, position, *inputs[-3:]))
    if isinstance(position, Tensor):
        check_range(op, "state.position", position, inputs.mini_batch_size - 1)
    dtype = torch.promote_types(inputs.q.dtype, torch.float32)
    tensors = tuple(x.to(dtype) for x in tensors)
    return Opened(tensors[:count], tensors[count:], position)


def _count(state: Any) -> int:
    """The tensors of an inner model; a state has three for each, and its position."""
    return (len(state) - 1) // 3
