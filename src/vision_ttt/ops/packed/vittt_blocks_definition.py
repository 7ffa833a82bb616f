"""The definition of packed_vittt_blocks, in PyTorch's operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops._table import TABLE
from vision_ttt.ops.packed.linear import packed_linear_definition
from vision_ttt.ops.packed.vittt_block_weights import VitttBlockSizes, split_parameters
from vision_ttt.ops.packed.weights import resolve_negative


def packed_vittt_blocks_definition(
    y: Tensor, weights: Tensor, ints: Sequence[int], floats: Sequence[float]
) -> Tensor:
    """See :func:`vision_ttt.ops.packed.packed_vittt_blocks`. It rounds where the kernels round."""
    for block in resolve_negative(weights):
        y = _define_block(y, block, ints, floats)
    return y


def _define_block(
    y: Tensor, weights: Tensor, ints: Sequence[int], floats: Sequence[float]
) -> Tensor:
    height, width, *numbers = ints
    sizes = VitttBlockSizes(*numbers)
    parameters = split_parameters(weights, y.shape[-1], sizes)
    parameters = [x if x.dtype == torch.bfloat16 else x.to(y.dtype) for x in parameters]
    conv2d, norm_weight, norm_bias, views, gate, rates, rates_bias, *rest = parameters
    conv_q, conv_q_bias, conv_k, conv_k_bias, w1, b1, w2, b2, *rest = rest
    inner_weight, inner_bias, scale, post_weight, post_bias, out_proj, *rest = rest
    mlp_norm_weight, mlp_norm_bias, mlp_gate, mlp_value, mlp_out = rest
    heads, directions, taps, hidden, mini_batch_size, kernel, *_ = sizes
    rate, norm_eps, inner_eps, post_eps, mlp_norm_eps = floats
    dtype, dim = out_proj.dtype, y.shape[-1]
    inner = directions * dim

    if kernel:
        weight = conv2d.t().reshape(dim, 1, kernel, kernel)
        y = y + _define("depthwise_conv2d", y, weight, height, width)
    x = F.layer_norm(y, (dim,), norm_weight, norm_bias, norm_eps)
    projected = packed_linear_definition(x, views, None, sizes.views * inner)
    k, *q, v = projected.to(dtype).to(y.dtype).split(inner, dim=-1)
    q = q[0] if q else k
    reverse = inner - dim
    if taps:
        q = _define("directional_conv1d", q, conv_q.unsqueeze(1), conv_q_bias, reverse)
        k = _define("directional_conv1d", k, conv_k.unsqueeze(1), conv_k_bias, reverse)
    q, k, v = (view.unflatten(-1, (heads, inner // heads)) for view in (q, k, v))
    eta = rate * torch.sigmoid(packed_linear_definition(x, rates, rates_bias, heads))
    z, *_ = _define(
        "ttt_mlp" if w2.numel() else "ttt_linear",
        *(q, k, v, eta),
        *((w1, b1, w2, b2) if w2.numel() else (w1, b1)),
        *(inner_weight, inner_bias, scale.repeat_interleave(heads // directions, dim=0)),
        *(mini_batch_size, heads // directions * (directions - 1), inner_eps),
    )
    logits = packed_linear_definition(x, gate, None, dim) if gate.numel() else None
    z = z.flatten(2).to(dtype).to(y.dtype)
    merged = _define("gated_norm", z, logits, post_weight, post_bias, post_eps)
    y = y + packed_linear_definition(merged, out_proj, None, dim)
    x = F.layer_norm(y, (dim,), mlp_norm_weight, mlp_norm_bias, mlp_norm_eps)
    projections = (packed_linear_definition(x, w, None, hidden) for w in (mlp_gate, mlp_value))
    activated = _define("swiglu", torch.cat(tuple(projections), dim=-1))
    return y + packed_linear_definition(activated, mlp_out, None, dim)


def _define(op: str, *arguments: Any) -> Any:
    """Compute an op of the table by its definition."""
    return TABLE[op].definition(TABLE[op].inputs(*arguments))
