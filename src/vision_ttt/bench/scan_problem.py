"""The measured calls of selective_scan: their inputs, and another project's way to compute them."""

from __future__ import annotations

import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_ttt.bench.names import MAMBAPY as NAME


def scan_inputs(
    batch: int,
    tokens: int,
    channels: int,
    states: int,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    shared: bool,
) -> dict[str, Tensor]:
    """Fresh random tensors of a Mamba layer's scan, with skip, gate and bias of δ.

    u, delta, z and the groups' B and C have the given dtype, the others float32 (float64 where that
    is). A is that of a fresh layer, -1 … -N, and δ around 0.05.

    Args:
        shared: one B and C for all channels; otherwise one for each direction's half.
    """
    full = torch.promote_types(dtype, torch.float32)
    place = {"dtype": full, "device": device}
    groups = () if shared else (2,)
    names = "u", "delta", "z"
    rows = {name: torch.randn(batch, tokens, channels, **place).to(dtype) for name in names}
    matrices = [torch.randn(batch, tokens, *groups, states, **place).to(dtype) for _ in range(2)]
    return {
        "u": rows["u"],
        "delta": rows["delta"],
        "A": -torch.arange(1, states + 1, **place).repeat(channels, 1),
        "B": matrices[0],
        "C": matrices[1],
        "D": torch.randn(channels, **place),
        "z": rows["z"],
        "delta_bias": torch.full((channels,), -3.0, **place),
        "initial_state": torch.zeros(batch, channels, states, **place),
    }


def refusal(dtype: torch.dtype) -> str | None:
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
