"""The definition of packed_mamba_block, in PyTorch's operations."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops._table import TABLE
from vision_ttt.ops.packed.linear import packed_linear_definition
from vision_ttt.ops.packed.mamba_block_weights import STATES, MambaBlockSizes, split_parameters
from vision_ttt.ops.packed.weights import as_it_lies


def packed_mamba_block_definition(
    y: Tensor, weights: Tensor, ints: Sequence[int], eps: float
) -> Tensor:
    """See :func:`vision_ttt.ops.packed.packed_mamba_block`. It rounds where the kernels round."""
    sizes = MambaBlockSizes(*ints)
    dim, inner, rank = y.shape[-1], sizes.inner, sizes.rank
    p = split_parameters(as_it_lies(weights), dim, sizes)
    dtype = p.in_proj.dtype

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).to(y.dtype)

    def direction(x: Tensor, index: int, vectors: Tensor, low: Tensor, steps: Tensor) -> Tensor:
        conv, bias, steps_bias, decay, skip = (
            each[index].to(y.dtype)
            for each in (p.conv, p.conv_bias, p.steps_bias, p.decay, p.skip)
        )
        reverse = index * inner
        convolved = _define("directional_conv1d", x, conv.t().unsqueeze(1), bias, reverse)
        u = rounded(F.silu(convolved))
        b, c = packed_linear_definition(u, vectors, None, 2 * STATES).split(STATES, dim=-1)
        r = rounded(packed_linear_definition(u, low, None, rank))
        logits = packed_linear_definition(r, steps, steps_bias, inner)
        a = decay.t() * math.log(2)
        scan = (u, logits, a, b, c, skip, None, None, None, True, reverse)
        return rounded(_define("selective_scan", *scan)[0])

    normed = F.rms_norm(y, (dim,), p.norm.to(y.dtype), eps)
    x, z = rounded(packed_linear_definition(normed, p.in_proj, None, 2 * inner)).chunk(2, dim=-1)
    forth = direction(x, 0, p.vectors_forth, p.low_forth, p.steps_forth)
    back = direction(x, 1, p.vectors_back, p.low_back, p.steps_back)
    gated = 0.5 * (forth + back) * F.silu(z)
    return y + packed_linear_definition(gated, p.out_proj, None, dim)


def _define(op: str, *arguments: object) -> Tensor | tuple[Tensor, ...]:
    """Compute an op of the table by its definition."""
    return TABLE[op].definition(TABLE[op].inputs(*arguments))
