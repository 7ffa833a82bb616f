"""fused_ttt_linear as a sequence of other ops, for calls that its kernels do not support."""

from __future__ import annotations

import torch
from torch import Tensor

from vision_ttt.ops.directional_conv1d import directional_conv1d
from vision_ttt.ops.fused_ttt_linear.contract import Inputs
from vision_ttt.ops.gated_norm import gated_norm
from vision_ttt.ops.ttt_linear import ttt_linear


def fused_ttt_linear_composition(x: Inputs) -> Tensor:
    """See :func:`vision_ttt.ops.fused_ttt_linear`. Every op selects its own backend."""
    heads, dim = x.b0.shape
    k, q, v, gate = x.projected.split(list(x.widths), dim=-1)
    q = q if x.widths[1] else k
    reverse_channels = x.reverse_heads * dim
    q = directional_conv1d(q, x.conv_q_weight, x.conv_q_bias, reverse_channels)
    k = directional_conv1d(k, x.conv_k_weight, x.conv_k_bias, reverse_channels)
    # Rates are at least float32, for views of any precision.
    logits = x.rate_logits.to(torch.promote_types(x.rate_logits.dtype, torch.float32))
    rows = x.position_scale.shape[0]
    z = ttt_linear(
        *(view.unflatten(-1, (heads, dim)) for view in (q, k, v)),
        torch.sigmoid(logits) * (x.base_learning_rate / dim),
        *(x.w0, x.b0, x.ln_weight, x.ln_bias),
        mini_batch_size=x.mini_batch_size,
        position_scale=x.position_scale.repeat_interleave(heads // rows, dim=0),
        reverse_heads=x.reverse_heads,
        eps=x.inner_eps,
    )
    gate = gate if x.widths[3] else None
    return gated_norm(z.flatten(2), gate, x.post_weight, x.post_bias, x.post_eps)
