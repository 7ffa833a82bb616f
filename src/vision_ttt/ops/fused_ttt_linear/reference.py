"""The definition of fused_ttt_linear: the composition of the definitions of what it joins."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vision_ttt.ops.directional_conv1d.reference import directional_conv1d_reference
from vision_ttt.ops.gated_norm.reference import gated_norm_reference
from vision_ttt.ops.ttt_linear.reference import ttt_linear_reference


def fused_ttt_linear_reference(
    projected: Tensor,
    rate_logits: Tensor,
    conv_q_weight: Tensor,
    conv_q_bias: Tensor,
    conv_k_weight: Tensor,
    conv_k_bias: Tensor,
    w0: Tensor,
    b0: Tensor,
    ln_weight: Tensor,
    ln_bias: Tensor,
    position_scale: Tensor,
    post_weight: Tensor,
    post_bias: Tensor,
    widths: Sequence[int],
    mini_batch_size: int,
    reverse_heads: int,
    base_learning_rate: float,
    inner_eps: float,
    post_eps: float,
) -> Tensor:
    """See :func:`vision_ttt.ops.fused_ttt_linear.fused_ttt_linear`."""
    heads, dim = b0.shape
    k, q, v, gate = projected.split(list(widths), dim=-1)
    q = q if widths[1] else k
    reverse = reverse_heads * dim
    q = directional_conv1d_reference(q, conv_q_weight, conv_q_bias, reverse)
    k = directional_conv1d_reference(k, conv_k_weight, conv_k_bias, reverse)
    views = (x.unflatten(-1, (heads, dim)) for x in (q, k, v))
    z, _, _ = ttt_linear_reference(
        *views,
        torch.sigmoid(rate_logits) * (base_learning_rate / dim),
        *(w0, b0, ln_weight, ln_bias),
        position_scale.repeat_interleave(heads // len(position_scale), dim=0),
        *(mini_batch_size, reverse_heads, inner_eps),
    )
    gate = gate if widths[3] else None
    return gated_norm_reference(z.flatten(2), gate, post_weight, post_bias, post_eps)
