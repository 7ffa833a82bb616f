"""The definition of packed_vittt_block, in PyTorch's operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops.depthwise_conv2d.reference import depthwise_conv2d_reference
from vision_ttt.ops.directional_conv1d.reference import directional_conv1d_reference
from vision_ttt.ops.gated_norm.reference import gated_norm_reference
from vision_ttt.ops.packed.linear import packed_linear_definition
from vision_ttt.ops.swiglu.reference import swiglu_reference
from vision_ttt.ops.ttt_linear.reference import ttt_linear_reference
from vision_ttt.ops.ttt_mlp.reference import ttt_mlp_reference


def packed_vittt_block_definition(
    y: Tensor, parameters: Sequence[Tensor], ints: Sequence[int], floats: Sequence[float]
) -> Tensor:
    """See :func:`vision_ttt.ops.packed.packed_vittt_block`; rounds where the kernels round."""
    conv2d, norm_weight, norm_bias, views, gate, rates, rates_bias, *rest = parameters
    conv_q, conv_q_bias, conv_k, conv_k_bias, w1, b1, w2, b2, *rest = rest
    inner_weight, inner_bias, scale, post_weight, post_bias, out_proj, *rest = rest
    mlp_norm_weight, mlp_norm_bias, mlp_gate, mlp_value, mlp_out = rest
    height, width, heads, directions, taps, hidden, mini_batch_size = ints
    rate, norm_eps, inner_eps, post_eps, mlp_norm_eps = floats
    dtype, dim = out_proj.dtype, y.shape[-1]
    inner = directions * dim

    if conv2d.numel():
        kernel = round(conv2d.shape[0] ** 0.5)
        weight = conv2d.t().reshape(dim, 1, kernel, kernel)
        y = y + depthwise_conv2d_reference(y, weight, height, width)
    x = F.layer_norm(y, (dim,), norm_weight, norm_bias, norm_eps)
    projected = packed_linear_definition(x, views, None, views.numel() // dim)
    k, *q, v = projected.to(dtype).to(y.dtype).split(inner, dim=-1)
    q = q[0] if q else k
    reverse = inner - dim
    if taps:
        q = directional_conv1d_reference(q, conv_q.unsqueeze(1), conv_q_bias, reverse)
        k = directional_conv1d_reference(k, conv_k.unsqueeze(1), conv_k_bias, reverse)
    q, k, v = (view.unflatten(-1, (heads, inner // heads)) for view in (q, k, v))
    eta = rate * torch.sigmoid(packed_linear_definition(x, rates, rates_bias, heads))
    learner = ttt_mlp_reference if w2.numel() else ttt_linear_reference
    z, *_ = learner(
        *(q, k, v, eta),
        *((w1, b1, w2, b2) if w2.numel() else (w1, b1)),
        *(inner_weight, inner_bias, scale.repeat_interleave(heads // directions, dim=0)),
        *(mini_batch_size, heads // directions * (directions - 1), inner_eps),
    )
    logits = packed_linear_definition(x, gate, None, dim) if gate.numel() else None
    z = z.flatten(2).to(dtype).to(y.dtype)
    merged = gated_norm_reference(z, logits, post_weight, post_bias, post_eps)
    y = y + packed_linear_definition(merged, out_proj, None, dim)
    x = F.layer_norm(y, (dim,), mlp_norm_weight, mlp_norm_bias, mlp_norm_eps)
    projections = (packed_linear_definition(x, w, None, hidden) for w in (mlp_gate, mlp_value))
    activated = swiglu_reference(torch.cat(tuple(projections), dim=-1))
    return y + packed_linear_definition(activated, mlp_out, None, dim)
