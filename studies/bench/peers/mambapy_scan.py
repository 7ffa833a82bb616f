"""mambapy's selective scan in PyTorch's operations, for calls where it equals `selective_scan`."""

from __future__ import annotations

import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor

from studies.bench.peers.agreement import TOLERANCES
from vision_ttt.bench.op_contenders import OpContender, Peer
from vision_ttt.bench.problems import Problem

NAME = "mambapy"


def refusal(problem: Problem, dtype: torch.dtype, device: torch.device) -> str | None:
    """The reason why mambapy does not support a call, or None if it does."""
    if dtype not in (torch.float32, torch.float64):
        return f"dtype {dtype} is not one of float32, float64"
    if importlib.util.find_spec("mambapy") is None:
        return f"it is not installed; pip install {NAME}"
    return None


def by_mambapy(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    delta_bias: Tensor,
    initial_state: Tensor,
) -> Tensor:
    """The shared case by mambapy's parallel scan, as transformers' ``MambaMixer`` calls it.

    It starts from no state, so that the initial one is added to the first token's update.
    """
    from mambapy.pscan import pscan

    delta = F.softplus(delta + delta_bias)
    decay = torch.exp(delta.unsqueeze(-1) * A)  # [B, T, D, N]
    update = (delta * u).unsqueeze(-1) * B.unsqueeze(2)
    first = update[:, :1] + decay[:, :1] * initial_state.unsqueeze(1)
    states = pscan(decay, torch.cat([first, update[:, 1:]], dim=1))
    y = (states @ C.unsqueeze(-1)).squeeze(-1) + D * u
    return y * F.silu(z)


def _contender(problem: Problem) -> OpContender:
    options = problem.options("dual")
    return OpContender(
        inputs=Problem.inputs,
        timed=by_mambapy,
        checked=lambda **tensors: {"output o": by_mambapy(**tensors)},  # it has no last state
        exact=lambda **tensors: {"output o": problem.function(**tensors, **options)},
        tolerances=TOLERANCES,
    )


PEER = Peer(_contender, refusal)
