"""The ops that fused_ttt_linear joins one after the other, for what its kernel does not take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vision_ttt.ops.directional_conv1d import directional_conv1d
from vision_ttt.ops.gated_norm import gated_norm
from vision_ttt.ops.ttt_linear import ttt_linear


def fused_ttt_linear_composition(
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
    """See :func:`vision_ttt.ops.fused_ttt_linear`; each part picks its own kernel."""
    heads, dim = b0.shape
    k, q, v, gate = projected.split(list(widths), dim=-1)
    q = q if widths[1] else k
    reverse_channels = reverse_heads * dim
    q = directional_conv1d(q, conv_q_weight, conv_q_bias, reverse_channels)
    k = directional_conv1d(k, conv_k_weight, conv_k_bias, reverse_channels)
    # Rates are at least float32, whatever the precision of the views.
    logits = rate_logits.to(torch.promote_types(rate_logits.dtype, torch.float32))
    rows = position_scale.shape[0]
    z = ttt_linear(
        *(x.unflatten(-1, (heads, dim)) for x in (q, k, v)),
        torch.sigmoid(logits) * (base_learning_rate / dim),
        *(w0, b0, ln_weight, ln_bias),
        mini_batch_size=mini_batch_size,
        position_scale=position_scale.repeat_interleave(heads // rows, dim=0),
        reverse_heads=reverse_heads,
        eps=inner_eps,
    )
    return gated_norm(z.flatten(2), gate if widths[3] else None, post_weight, post_bias, post_eps)
