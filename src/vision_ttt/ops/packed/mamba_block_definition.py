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
from vision_ttt.ops.packed.weights import resolve_negative


def packed_mamba_block_definition(
    y: Tensor, weights: Tensor, ints: Sequence[int], eps: float
) -> Tensor:
    """See :func:`vision_ttt.ops.packed.packed_mamba_block`. It rounds where the kernels round."""
    sizes = MambaBlockSizes(*ints)
    dim, inner, rank = y.shape[-1], sizes.inner, sizes.rank
    given = split_parameters(resolve_negative(weights), dim, sizes)
    dtype = given.in_proj.dtype
    p = given._make(x if x.dtype == torch.bfloat16 else x.to(y.dtype) for x in given)

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).to(y.dtype)

    def direction(x: Tensor, index: int, vectors: Tensor, low: Tensor, steps: Tensor) -> Tensor:
        taps, reverse = p.conv[index].t().unsqueeze(1), index * inner
        u = rounded(F.silu(_define("directional_conv1d", x, taps, p.conv_bias[index], reverse)))
        b, c = packed_linear_definition(u, vectors, None, 2 * STATES).split(STATES, dim=-1)
        r = rounded(packed_linear_definition(u, low, None, rank))
        logits = packed_linear_definition(r, steps, p.steps_bias[index], inner)
        a = p.decay[index].t() * math.log(2)
        scan = (u, logits, a, b, c, p.skip[index], None, None, None, True, reverse)
        return rounded(_define("selective_scan", *scan)[0])

    normed = F.rms_norm(y, (dim,), p.norm, eps)
    x, z = rounded(packed_linear_definition(normed, p.in_proj, None, 2 * inner)).chunk(2, dim=-1)
    forth = direction(x, 0, p.vectors_forth, p.low_forth, p.steps_forth)
    back = direction(x, 1, p.vectors_back, p.low_back, p.steps_back)
    gated = 0.5 * (forth + back) * F.silu(z)
    return y + packed_linear_definition(gated, p.out_proj, None, dim)


def _define(op: str, *arguments: object) -> Tensor | tuple[Tensor, ...]:
    """Compute an op of the table by its definition."""
    return TABLE[op].definition(TABLE[op].inputs(*arguments))
