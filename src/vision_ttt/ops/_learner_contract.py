"""The contracts of the learner ops: shapes, dtypes and ranges of their arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vision_ttt.ops._contract import Contract, Flag, Real, Whole, check_whole_numbers


class LearnerContracts(NamedTuple):
    """The contracts of the public function and of its custom ops, which accept any strides.

    ``state`` is the contract of the public function for calls with a state. It also covers the
    ``start_`` and ``sum_`` tensors and the position of the state. ``one_state`` is the contract of
    losses without learning. It covers tokens k, v and one state for all tokens.
    """

    public: Contract
    forward: Contract
    backward: Contract
    part: Contract
    state: Contract
    one_state: Contract


def learner_contracts(op: str, state: Mapping[str, str], fields: Sequence[str]) -> LearnerContracts:
    """Make the contracts of an op.

    The arguments of its backward pass are the gradients of o and of the last state, the op's own
    tensors, and N saved states.

    Args:
        op: the op's public name.
        state: tensor of the initial state → its shape after [H] or [B, H].
        fields: the names of these tensors in a state that a later call continues from.
    """
    views = "q", "k", "v"
    model = {
        **{name: f"H {shape} | B H {shape}" for name, shape in state.items()},
        "ln_weight": "? H d",
        "ln_bias": "? H d",
    }
    tensors = {
        **dict.fromkeys(views, "B T H d"),
        "eta": "B T H",
        **model,
        "position_scale": "? mini_batch_size | H mini_batch_size",
    }
    grads = {
        "grad_o": "B T H d",
        **{f"grad_{name}": f"B H {shape}" for name, shape in state.items()},
    }
    kept = {f"kept_{name}": f"N B H {shape}" for name, shape in state.items()}
    numbers = {"mini_batch_size": Whole(1), "reverse_heads": Whole(0, "H"), "eps": Real(0)}

    rules: dict[str, Any] = {"alike": views, "together": ("ln_weight", "ln_bias")}
    forward = Contract(op, tensors, numbers, **rules)
    return LearnerContracts(
        Contract(op, tensors, numbers, **rules, autocast=True, dense_last=views),
        forward,
        forward.backward(grads, kept, may_be_0="BN"),
        Contract(
            f"{op}_part",
            {
                **tensors,
                **{name: f"B H {shape}" for name, shape in state.items()},
                **{f"sum_{name}": f"B H {shape}" for name, shape in state.items()},
            },
            {"position": Whole(0), "mini_batch_size": Whole(1), "eps": Real(0)}
            | {"return_state": Flag()},
            **rules,
            others=("positions",),
            further=_check_places,
        ),
        Contract(
            op,
            {
                **tensors,
                **{
                    f"state.{kind}_{field}": f"B H {shape}"
                    for kind in ("start", "sum")
                    for field, shape in zip(fields, state.values(), strict=True)
                },
            },
            numbers,
            **rules,
            autocast=True,
            dense_last=views,
            others=("state.position",),
            further=_check_position,
        ),
        Contract(
            f"{op}_losses",
            {"k": "B T H d", "v": "B T H d", **model},
            {"eps": Real(0)},
            alike=("k", "v"),
            autocast=True,
            together=("ln_weight", "ln_bias"),
        ),
    )


def _check_position(op: str, values: Mapping[str, Any]) -> None:
    """Raise an error unless a state's position is valid; the values of a tensor are not checked."""
    position, size = values["state.position"], values["mini_batch_size"]
    if isinstance(position, Tensor):
        check_whole_numbers(op, "state.position", position, values["q"])
    elif isinstance(position, bool) or not isinstance(position, (int, torch.SymInt)):
        raise TypeError(
            f"{op}: state.position must be a whole number, or a tensor of one for each sequence, "
            f"got {position!r}"
        )
    elif not 0 <= position < size:
        raise ValueError(
            f"{op}: state.position must be in 0 … {size - 1} with mini_batch_size={size}, got "
            f"{position}"
        )


def _check_places(op: str, values: Mapping[str, Any]) -> None:
    """Raise an error unless all tokens belong to one mini-batch."""
    positions, position, size = (values[n] for n in ("positions", "position", "mini_batch_size"))
    batch, length = values["q"].shape[:2]
    if positions is None:
        if position + length > size:
            raise ValueError(
                f"{op}: position + tokens must be at most mini_batch_size={size}, got "
                f"{position} + {length}"
            )
        return
    device = values["q"].device
    if positions.dtype != torch.int64 or positions.shape != (batch,) or positions.device != device:
        raise ValueError(
            f"{op}: positions must be int64 of shape [{batch}] on {device}, got {positions.dtype} "
            f"{list(positions.shape)} on {positions.device}"
        )
    if length != 1:
        raise ValueError(f"{op}: with positions there must be one token, got {length}")
