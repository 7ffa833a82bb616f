"""The definition of fused_mamba: the composition of its parts' definitions, and of their ops."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops.directional_conv1d import contract as convolution
from vision_ttt.ops.directional_conv1d.definition import directional_conv1d_definition
from vision_ttt.ops.directional_conv1d.op import OP as CONVOLUTION
from vision_ttt.ops.fused_mamba.contract import Inputs
from vision_ttt.ops.selective_scan import contract as recurrence
from vision_ttt.ops.selective_scan.definition import selective_scan_definition
from vision_ttt.ops.selective_scan.op import OP as RECURRENCE


def _compose(
    x: Inputs,
    convolve: Callable[[convolution.Inputs], Tensor],
    scan: Callable[[recurrence.Inputs], tuple[Tensor, Tensor]],
) -> Tensor:
    inner = x.inner()
    tokens, z = x.projected.chunk(2, dim=-1)  # [B, T, E]
    both = torch.cat([tokens, tokens], dim=-1)
    u = F.silu(convolve(convolution.Inputs(both, x.conv_weight, x.conv_bias, inner)))
    # B images, t tokens, g directions, E channels; o of r, B and C.
    small = torch.einsum("btge,goe->btgo", u.unflatten(-1, (2, inner)), x.x_proj.to(u.dtype))
    r, b, c = small.split_with_sizes(list(x.widths()), dim=-1)
    delta = torch.einsum("btgr,ger->btge", r, x.dt_proj.to(r.dtype)).flatten(2)
    y, _ = scan(
        recurrence.Inputs(u, delta, x.A, b, c, x.D, None, x.dt_bias, None, True, inner)
    )  # [B, T, 2 E]
    forward, backward = y.chunk(2, dim=-1)
    return 0.5 * (forward + backward) * F.silu(z)


def fused_mamba_definition(x: Inputs) -> Tensor:
    """See :func:`vision_ttt.ops.fused_mamba.fused_mamba`."""
    return _compose(x, directional_conv1d_definition, selective_scan_definition)


def fused_mamba_composition(x: Inputs) -> Tensor:
    """The same by other ops, each with backends of its own."""
    return _compose(x, CONVOLUTION, RECURRENCE)
