"""flash-linear-attention's `fused_chunk_ttt_linear`, for calls where it equals `ttt_linear`.

Its step is that of `ttt_linear` with other names (`chunk_size` b, `initial_state` W₀ per batch
element), with three differences:

- its learning rate η_t [B, T, H, 1] is that of the query's token t, not of the key's: it is a
  position scale per token, and a learning rate per key does not exist;
- every head scans forwards;
- its output is f(q_t) = z_t + LN(z_t) with z_t = q_t W_t + b_t, that of `ttt_linear` q_t + LN(z_t).

With one learning rate for all tokens and all heads scanning forwards, both compute the same states,
and their outputs differ by the last summand only.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from studies.bench.peers.agreement import TOLERANCES
from vision_ttt.bench.op_contenders import Inputs, OpContender, Peer
from vision_ttt.bench.problems import Problem
from vision_ttt.ops import ttt_linear

NAME = "flash-linear-attention"
LARGEST_DIMENSION = 128
"""The largest head dimension that its kernels support."""
CHUNK_SIZES = (16, 32, 64)
"""The mini-batch sizes to measure: powers of two of at least 16, the rows of a tensor core."""


def refusal(problem: Problem, dtype: torch.dtype, device: torch.device) -> str | None:
    """The reason why it does not support a problem on the device, or None if it does."""
    if device.type != "cuda":
        return f"its kernels are for cuda, not {device.type}"
    if dtype == torch.float64:
        return "dtype float64 is not supported"
    if problem.dim > LARGEST_DIMENSION:
        return f"head dimension {problem.dim} is over {LARGEST_DIMENSION}"
    if problem.mini_batch_size not in CHUNK_SIZES:
        return f"mini_batch_size {problem.mini_batch_size} is not one of {CHUNK_SIZES}"
    if importlib.util.find_spec("fla") is None:
        return f"it is not installed; pip install {NAME}"
    return None


def arguments(inputs: dict[str, Tensor], mini_batch_size: int) -> dict[str, Tensor]:
    """Convert arguments of `ttt_linear` for a `shared` problem to its own, as new leaves.

    Its kernels require the norm and η in the dtype of the views and a state per batch element.

    Args:
        inputs: those of :meth:`Problem.inputs`, with eta [B, T, H] of a single value.
        mini_batch_size: b.
    """
    q = inputs["q"]
    batch, length, heads, dim = q.shape
    positions = torch.arange(length, device=q.device) % mini_batch_size
    eta = inputs["eta"] * inputs["position_scale"][positions, None]
    prepared = {
        **{name: inputs[name] for name in "qkv"},
        "w": inputs["ln_weight"].to(q.dtype),
        "b": inputs["ln_bias"].to(q.dtype),
        "eta": eta.unsqueeze(-1).to(q.dtype),
        "initial_state": inputs["w0"].expand(batch, heads, dim, dim),
        "initial_state_bias": inputs["b0"].unsqueeze(1).expand(batch, heads, 1, dim),
    }
    return {
        name: x.detach()
        .clone(memory_format=torch.contiguous_format)
        .requires_grad_(inputs[argument].requires_grad)
        for (name, x), argument in zip(prepared.items(), _ARGUMENTS, strict=True)
    }


_ARGUMENTS = ("q", "k", "v", "ln_weight", "ln_bias", "eta", "w0", "b0")


def fused_chunk(problem: Problem) -> Callable[..., Tensor]:
    """Its function o = f(q, k, v, w, b, eta, initial_state, initial_state_bias)."""
    from fla.ops.ttt import fused_chunk_ttt_linear

    # By default it scales the queries by 1 / √d, which `ttt_linear` does not.
    function = partial(fused_chunk_ttt_linear, scale=1.0, chunk_size=problem.mini_batch_size)

    def output(**tensors: Tensor) -> Tensor:
        return function(**tensors)[0]

    return output


def by_ttt_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    b: Tensor,
    eta: Tensor,
    initial_state: Tensor,
    initial_state_bias: Tensor,
    *,
    chunk_size: int,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The definition of its function by calls of `ttt_linear`, to check it against.

    It makes a call per token, whose final state is W_t. It is slow, differentiable and supports
    every dtype.

    Returns:
        o [B, T, H, d] and the final state, W [B, H, d, d] and b [B, H, 1, d].
    """
    batch, length, heads, _ = q.shape

    def folded(x: Tensor) -> Tensor:
        """[B, T, H, …] → [1, T, B · H, …], because a position scale has no batch axis."""
        return x.movedim(0, 1).flatten(1, 2).unsqueeze(0)

    q, k, v, eta = (folded(x) for x in (q, k, v, eta))
    gain, offset = w.repeat(batch, 1), b.repeat(batch, 1)
    state = initial_state.flatten(0, 1), initial_state_bias.flatten(0, 2)
    outputs = []
    for start in range(0, length, chunk_size):
        scale = eta[0, start : start + chunk_size, :, 0].T  # [B · H, n]
        taught = state
        for count in range(1, scale.shape[1] + 1):
            seen = slice(start, start + count)
            o, (state_w, state_b, *_) = ttt_linear(
                *(q[:, seen], k[:, seen], v[:, seen]),
                torch.ones_like(eta[:, seen, :, 0]),
                *taught,
                *(gain, offset),
                mini_batch_size=count,
                position_scale=scale[:, :count],
                return_state=True,
                backend="dual",
            )
            query = q[:, start + count - 1]
            z = (query.unsqueeze(-2) @ state_w).squeeze(-2) + state_b  # [1, B · H, d]
            outputs.append(z + o[:, -1] - query)
            state = state_w, state_b
    o = torch.stack(outputs, dim=1).unflatten(2, (batch, heads))[0].movedim(1, 0)
    final_w, final_b = (x.flatten(0, 1).unflatten(0, (batch, heads)) for x in state)
    return o, (final_w, final_b.unsqueeze(2))


def _contender(problem: Problem) -> OpContender:
    function = fused_chunk(problem)
    definition = partial(by_ttt_linear, chunk_size=problem.mini_batch_size)

    def inputs(
        problem: Problem, dtype: torch.dtype, device: torch.device, *, requires_grad: bool
    ) -> Inputs:
        ours = problem.inputs(dtype, device, requires_grad=requires_grad)
        return arguments(ours, problem.mini_batch_size)

    return OpContender(
        inputs=inputs,
        timed=function,
        # Its final bias includes the padding of a short mini-batch, so final states are not
        # compared.
        checked=lambda **tensors: {"output o": function(**tensors)},
        exact=lambda **tensors: {"output o": definition(**tensors)[0]},
        tolerances=TOLERANCES,
    )


PEER = Peer(_contender, refusal)
