"""The measured implementations of an op: its backends, and other projects' implementations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from vision_ttt.bench.problems import Problem
from vision_ttt.ops._table import TABLE

Inputs = dict[str, Tensor]
"""Argument → tensor."""
Outputs = dict[str, Tensor]
"""Result → tensor."""

# max|got − wanted| / max|wanted| of outputs and of gradients. Inputs are rounded first, so that the
# error is that of the arithmetic only.
TOLERANCES = {
    torch.float32: (1e-5, 5e-5),
    torch.bfloat16: (1e-2, 2e-2),
    torch.float16: (2e-3, 4e-3),
}


class OpContender(NamedTuple):
    """One implementation of the op for one problem.

    `timed` and `checked` are called with `inputs` as keyword arguments. The check compares
    `checked` with `exact`, called with the same inputs in float64, and all gradients of both.
    """

    inputs: Callable[..., Inputs]
    """(problem, dtype, device, *, requires_grad) → fresh tensors."""
    timed: Callable[..., Tensor]
    """The call to be timed."""
    checked: Callable[..., Outputs]
    """The call to be checked."""
    exact: Callable[..., Outputs]
    """The definition of `checked`."""
    tolerances: dict[torch.dtype, tuple[float, float]]
    """Dtype → tolerances of outputs and of gradients."""


class Peer(NamedTuple):
    """Another project's implementation of an op, which requires a `shared` problem."""

    contender: Callable[[Problem], OpContender]
    refusal: Callable[[Problem, torch.dtype, torch.device], str | None]
    """The reason why it does not support a problem, or None if it does."""


PEERS: dict[str, dict[str, Peer]] = {}
"""Op → the other projects' implementations by name, as those who compare with them enter them."""


def backends(op: str) -> list[str]:
    """The op's own backends that can be timed."""
    return [*TABLE[op].backends, "reference"]


def op_contenders(op: str) -> list[str]:
    """The default contenders: all but the reference, which is written for reading."""
    return [*TABLE[op].backends, *PEERS.get(op, ())]


def known_contenders(op: str) -> list[str]:
    """All contenders that the command line accepts."""
    return [*backends(op), *PEERS.get(op, ())]


def refusal(name: str, problem: Problem, dtype: torch.dtype, device: torch.device) -> str | None:
    """The reason why a contender does not support the problem on the device, None if it does."""
    if name in PEERS.get(problem.op, ()):
        return PEERS[problem.op][name].refusal(problem, dtype, device)
    if name == "reference":
        return None
    op = TABLE[problem.op]
    if problem.op == "selective_scan":
        small = problem._replace(batch=1, tokens=1)
        tensors = small.inputs(dtype, device, requires_grad=False)
        inputs = op.inputs(**tensors, delta_softplus=True, reverse_channels=0)
        return op.backends[name].refusal(inputs._replace(reverse_channels=small.channels // 2))
    view = torch.empty(1, 1, 1, problem.dim, dtype=dtype, device=device)
    inputs = op.inputs(*[None] * op.width)._replace(q=view, ln_weight=view[0, 0])
    return op.backends[name].refusal(inputs._replace(mini_batch_size=problem.mini_batch_size))


def op_contender(name: str, problem: Problem) -> OpContender:
    """The contender `name`. Another project's implementation requires a `shared` problem."""
    if name in PEERS.get(problem.op, ()):
        return PEERS[problem.op][name].contender(problem)
    options = problem.options(name)
    return OpContender(
        inputs=Problem.inputs,
        timed=partial(problem.function, **options),
        checked=partial(_with_state, problem, **options),
        exact=partial(_with_state, problem, **problem.options("dual")),
        tolerances=TOLERANCES,
    )


def _with_state(problem: Problem, **arguments: object) -> Outputs:
    o, state = problem.function(**arguments, return_state=True)
    state = (state,) if isinstance(state, Tensor) else state
    names = [f"final state {name}" for name in problem.state_shapes()]
    return {"output o": o, **dict(zip(names, state[: len(names)], strict=True))}
