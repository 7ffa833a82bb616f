"""fused_mamba by the kernels of its parts, which computes all but the scan's states twice.

The forward pass saves the projected tokens, which it is given, and a state per 64 tokens. The
backward pass computes the convolution, the small projections and the states between the saved ones
again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops._native import LANES
from vision_ttt.ops._op import Backend
from vision_ttt.ops.directional_conv1d import contract as convolution
from vision_ttt.ops.fused_mamba.contract import Inputs
from vision_ttt.ops.linear import contract as product
from vision_ttt.ops.selective_scan import contract as recurrence


class _Small(NamedTuple):
    """The small projections of both directions, and what they give."""

    x_weights: list[Tensor]  # [r | zeros | B | C | zeros, E] per direction
    dt_weights: list[Tensor]  # [E, r | zeros] per direction
    projected: list[Tensor]  # [B, T, r | zeros | B | C | zeros] per direction
    delta: Tensor  # [B, T, 2 E]
    b: Tensor  # [B, T, 2, N]
    c: Tensor


def _up(columns: int) -> int:
    """Columns that fill up those of r, or all, to a multiple that product kernels need."""
    return -columns % LANES


def _small_weights(x: Inputs) -> tuple[list[Tensor], list[Tensor]]:
    rank, states, _ = x.widths()
    gap, end = _up(rank), _up(rank + _up(rank) + 2 * states)
    r, matrices = x.x_proj.split_with_sizes([rank, 2 * states], dim=1)
    wide = torch.cat([F.pad(r, (0, 0, 0, gap)), F.pad(matrices, (0, 0, 0, end))], dim=1)
    return list(wide), list(F.pad(x.dt_proj, (0, gap)))


class Parts(NamedTuple):
    """What computes the parts of fused_mamba."""

    convolve: Backend  # of directional_conv1d
    scan: Backend  # of selective_scan
    multiply: Backend  # of linear
    silu: Callable[[Tensor], Tensor]
    silu_backward: Callable[[Tensor, Tensor], Tensor]
    """(x, gradient of SiLU(x)) → gradient of x."""


def recomputing(parts: Parts, refusal: Callable[[Inputs], str | None]) -> Backend:
    """The backend of fused_mamba that runs on these parts.

    Args:
        parts: what computes them.
        refusal: (inputs) → the reason why they do not support them, None if they do.
    """
    convolve, scan, multiply, silu, silu_backward = parts

    def convolution_of(x: Inputs) -> convolution.Inputs:
        tokens, _ = x.projected.chunk(2, dim=-1)
        both = torch.cat([tokens, tokens], dim=-1)
        return convolution.Inputs(both, x.conv_weight, x.conv_bias, x.inner())

    def project(x: Inputs, u: Tensor) -> _Small:
        rank, states, _ = x.widths()
        start = rank + _up(rank)
        weights = _small_weights(x)
        projected, deltas = [], []
        for own, to_x, to_dt in zip(u.chunk(2, dim=-1), *weights, strict=True):
            projected.append(multiply.forward(product.Inputs(own, to_x, None)))
            r = projected[-1][..., :start]
            deltas.append(multiply.forward(product.Inputs(r, to_dt, None)))
        matrices = torch.stack([p[..., start : start + 2 * states] for p in projected], dim=2)
        b, c = matrices.chunk(2, dim=-1)
        return _Small(*weights, projected, torch.cat(deltas, dim=-1), b, c)

    def scan_of(x: Inputs, u: Tensor, small: _Small) -> recurrence.Inputs:
        # The scan's own gate: its backward pass then has the gate's gradient without y.
        _, z = x.projected.chunk(2, dim=-1)
        tensors = u, small.delta, x.A, small.b, small.c, x.D, torch.cat([z, z], dim=-1), x.dt_bias
        return recurrence.Inputs(*tensors, None, True, x.inner())

    def forward(x: Inputs, keep: bool) -> tuple[Tensor, Tensor]:
        u = silu(convolve.forward(convolution_of(x)))
        y, _, kept = scan.forward(scan_of(x, u, project(x, u)), keep)
        one, other = y.chunk(2, dim=-1)
        return (one + other).mul_(0.5), kept

    def backward(x: Inputs, grad: Tensor, kept: Tensor) -> tuple[Tensor, ...]:
        rank, states, _ = x.widths()
        start = rank + _up(rank)
        of_conv = convolution_of(x)
        v = convolve.forward(of_conv)
        u = silu(v)
        small = project(x, u)
        half = 0.5 * grad.to(u.dtype)
        du, ddelta, da, db, dc, dskip, dgate, dbias, _ = scan.backward(
            scan_of(x, u, small),
            torch.cat([half, half], dim=-1),
            kept.new_zeros(kept.shape[1:]),
            kept,
        )
        dus, dx_proj, ddt_proj = [], [], []
        directions = zip(*small[:3], u.chunk(2, dim=-1), ddelta.chunk(2, dim=-1), strict=True)
        for g, (to_x, to_dt, projected, own, step) in enumerate(directions):
            of_dt = product.Inputs(projected[..., :start], to_dt, None)
            dr, dto_dt, _ = multiply.backward(of_dt, step)
            dmatrices = torch.cat([dr, db[:, :, g], dc[:, :, g]], dim=-1)
            dprojected = F.pad(dmatrices, (0, to_x.shape[0] - dmatrices.shape[-1]))
            through, dto_x, _ = multiply.backward(product.Inputs(own, to_x, None), dprojected)
            dus.append(through)
            dx_proj.append(torch.cat([dto_x[:rank], dto_x[start : start + 2 * states]]))
            ddt_proj.append(dto_dt[:, :rank])
        dv = silu_backward(v, du + torch.cat(dus, dim=-1))
        dboth, dconv_weight, dconv_bias = convolve.backward(of_conv, dv)
        dtokens, dz = (pair.unflatten(-1, (2, x.inner())).sum(2) for pair in (dboth, dgate))
        return (
            torch.cat([dtokens, dz], dim=-1),
            *(dconv_weight, dconv_bias, torch.stack(dx_proj), torch.stack(ddt_proj)),
            *(dbias, da, dskip),
        )

    return Backend(forward, backward, refusal)
