"""What every state that goes on can do: be moved, detached, batch-selected, saved.

A state is a NamedTuple of tensors [B, …], of numbers, of None and of further states. The functions
of this module are its methods.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

State = TypeVar("State")


def of_each(function: Callable[[Tensor], Tensor], state: State) -> State:
    """Return the state with a function applied to each of its tensors."""
    if isinstance(state, Tensor):
        return function(state)
    if isinstance(state, tuple):
        return type(state)._make(of_each(function, each) for each in state)  # type: ignore[attr-defined]
    return state


def detach(state: State) -> State:
    """Return the state cut off from autograd: where truncated backpropagation ends."""
    return of_each(Tensor.detach, state)


def to(state: State, *args: Any, **kwargs: Any) -> State:
    """Return the state on another device or in another dtype, as ``Tensor.to``.

    Whole numbers, such as positions, keep their dtype.
    """

    def move(x: Tensor) -> Tensor:
        moved = x.to(*args, **kwargs)
        return moved if x.is_floating_point() else moved.to(x.dtype)

    return of_each(move, state)


def select(state: State, rows: Tensor | Sequence[int] | slice) -> State:
    """Return the state of some of the batch's sequences, in the order that is asked for.

    Args:
        rows: their indices, each as often as it is wanted; a mask [B]; or a slice.
    """
    return of_each(lambda x: x[rows], state)


def take(x: Tensor, index: Tensor) -> Tensor:
    """x[i, index[i, n], …] for x [B, T, …] and index [B, n]; out of range stands for the end."""
    rows = torch.arange(len(x), device=x.device).unsqueeze(1)
    return x[rows, index.clamp(0, x.shape[1] - 1)]


def concatenate(parts: Sequence[State]) -> State:
    """Return the state of the sequences of several states, one after the other.

    Where these have different numbers, such as positions, every sequence gets its own.

    Raises:
        ValueError: there is no state, or the states are not of one kind.
    """
    if not parts:
        raise ValueError("concatenate needs at least one state, got none")
    batches = [_first_tensor(part) for part in parts]
    return _concatenated(parts, [len(x) for x in batches], batches[0].device)


def _first_tensor(state: Any) -> Tensor:
    while not isinstance(state, Tensor):
        state = state[0]
    return state


def _concatenated(parts: Sequence[Any], sizes: Sequence[int], device: torch.device) -> Any:
    first = parts[0]
    # A number may be a tensor in another state, and both are of one kind.
    kinds = {type(x) if x is None or isinstance(x, tuple) else Tensor for x in parts}
    if len(kinds) > 1:
        names = " and ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(f"concatenate needs states of one kind, got {names} in one place")
    if isinstance(first, tuple):
        fields = zip(*parts, strict=True)
        return type(first)._make(_concatenated(x, sizes, device) for x in fields)  # type: ignore[attr-defined]
    if first is None:
        return None
    if not any(isinstance(x, Tensor) for x in parts) and len(set(parts)) == 1:
        return first
    each = (
        x if isinstance(x, Tensor) else torch.full((size,), x, dtype=torch.int64, device=device)
        for x, size in zip(parts, sizes, strict=True)
    )
    return torch.cat(list(each))


def tensors(state: Any) -> dict[str, Tensor]:
    """Return the state as named tensors, such as safetensors saves.

    The tensors are copies. Names of states within states are dotted; numbers become tensors without
    dimensions, and what is None is left out. :func:`from_tensors` is the inverse.
    """
    named = {}
    for name, value in zip(state._fields, state, strict=True):
        if isinstance(value, Tensor):
            named[name] = value.detach().clone(memory_format=torch.contiguous_format)
        elif isinstance(value, int):
            named[name] = torch.tensor(value, dtype=torch.int64, device="cpu")
        elif value is not None:
            named.update({f"{name}.{inner}": x for inner, x in tensors(value).items()})
    return named


def from_tensors(kind: type[State], named: dict[str, Tensor]) -> State:
    """Return the state of a kind whose :func:`tensors` are given.

    Raises:
        ValueError: a tensor is missing, or no field has its name.
    """
    hints = typing.get_type_hints(kind)
    fields, rest = {}, dict(named)
    for name, hint in hints.items():
        inner = {key[len(name) + 1 :]: rest.pop(key) for key in named if key.startswith(f"{name}.")}
        options = typing.get_args(hint) or (hint,)
        if inner:
            fields[name] = from_tensors(_kind_with(inner, options), inner)
        elif name in rest:
            value = rest.pop(name)
            fields[name] = value.item() if int in options and value.ndim == 0 else value
        elif type(None) in options:
            fields[name] = None
        else:
            raise ValueError(f"{kind.__name__} needs {name}, got {', '.join(named) or 'nothing'}")
    if rest:
        raise ValueError(f"{kind.__name__} has no {', '.join(rest)}; it has {', '.join(hints)}")
    return kind(**fields)


def _kind_with(named: dict[str, Tensor], options: Sequence[Any]) -> Any:
    """Of the kinds of states the first that has every name."""
    own = {name.partition(".")[0] for name in named}
    kinds = [option for option in options if own <= set(getattr(option, "_fields", ()))]
    if not kinds:
        raise ValueError(f"no state of {', '.join(map(str, options))} has {', '.join(sorted(own))}")
    return kinds[0]
