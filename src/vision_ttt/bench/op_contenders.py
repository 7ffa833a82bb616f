"""The measured implementations of an op: its backends, and other projects' implementations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from vision_ttt.bench import flash_linear_attention, scan_problem
from vision_ttt.bench.names import OPS
from vision_ttt.bench.problems import Problem
from vision_ttt.ops._op import Backend
from vision_ttt.ops._table import TABLE

KERNELS: dict[str, Mapping[str, Backend]] = {name: TABLE[name].backends for name in OPS}
"""Op → its backends, fastest first."""

PEERS = {"ttt_linear": (flash_linear_attention.NAME,), "selective_scan": (scan_problem.NAME,)}
"""Op → other projects' implementations, which require a `shared` problem."""

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
# Another project's implementation may be less exact, but must compute the same function. It rounds
# the factors of some float32 products to TF32.
PEER_TOLERANCES = {
    torch.float32: (1e-2, 5e-2),
    torch.bfloat16: (5e-2, 1e-1),
    torch.float16: (1e-2, 5e-2),
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


def backends(op: str) -> list[str]:
    """The op's own backends that can be timed."""
    return [*KERNELS[op], "reference"]


def op_contenders(op: str, device: torch.device) -> list[str]:
    """The default contenders: all but the reference, which is written for reading."""
    return [*KERNELS[op], *(_peers(op) if device.type == "cuda" or op == "selective_scan" else [])]


def known_contenders(op: str) -> list[str]:
    """All contenders that the command line accepts."""
    return [*backends(op), *_peers(op)]


def _peers(op: str) -> list[str]:
    return list(PEERS.get(op, ()))


def refusal(name: str, problem: Problem, dtype: torch.dtype, device: torch.device) -> str | None:
    """The reason why a contender does not support the problem on the device, None if it does."""
    if name == flash_linear_attention.NAME:
        return flash_linear_attention.refusal(problem, dtype, device)
    if name == scan_problem.NAME:
        return scan_problem.refusal(dtype)
    if name == "reference":
        return None
    op = TABLE[problem.op]
    if problem.op == "selective_scan":
        small = problem._replace(batch=1, tokens=1)
        tensors = small.inputs(dtype, device, requires_grad=False)
        inputs = op.inputs(**tensors, delta_softplus=True, reverse_channels=0)
        return op.backends[name].refusal(inputs._replace(reverse_channels=small.channels // 2))
    view = torch.empty(1, 1, 1, problem.dim, dtype=dtype, device=device)
    inputs = op.inputs(*[None] * op.width)._replace(q=view, mini_batch_size=problem.mini_batch_size)
    return op.backends[name].refusal(inputs)


def op_contender(name: str, problem: Problem) -> OpContender:
    """The contender `name`. Another project's implementation requires a `shared` problem."""
    if name == flash_linear_attention.NAME:
        return _flash_linear_attention(problem)
    if name == scan_problem.NAME:
        return _mambapy(problem)
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


def _mambapy(problem: Problem) -> OpContender:
    function = scan_problem.by_mambapy
    options = problem.options("dual")
    return OpContender(
        inputs=Problem.inputs,
        timed=function,
        checked=lambda **tensors: {"output o": function(**tensors)},  # it has no last state
        exact=lambda **tensors: {"output o": problem.function(**tensors, **options)},
        tolerances=PEER_TOLERANCES,
    )


def _flash_linear_attention(problem: Problem) -> OpContender:
    function = flash_linear_attention.fused_chunk(problem)
    definition = partial(flash_linear_attention.by_ttt_linear, chunk_size=problem.mini_batch_size)

    def inputs(
        problem: Problem, dtype: torch.dtype, device: torch.device, *, requires_grad: bool
    ) -> Inputs:
        ours = problem.inputs(dtype, device, requires_grad=requires_grad)
        return flash_linear_attention.arguments(ours, problem.mini_batch_size)

    return OpContender(
        inputs=inputs,
        timed=function,
        # Its final bias includes the padding of a short mini-batch, so final states are not
        # compared.
        checked=lambda **tensors: {"output o": function(**tensors)},
        exact=lambda **tensors: {"output o": definition(**tensors)[0]},
        tolerances=PEER_TOLERANCES,
    )
