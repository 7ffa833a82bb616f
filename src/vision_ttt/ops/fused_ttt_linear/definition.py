"""The definition of fused_ttt_linear: the composition of its parts' definitions."""

from __future__ import annotations

import torch
from torch import Tensor

from vision_ttt.ops.directional_conv1d import contract as convolution
from vision_ttt.ops.directional_conv1d.definition import directional_conv1d_definition
from vision_ttt.ops.fused_ttt_linear.contract import Inputs
from vision_ttt.ops.gated_norm import contract as merge
from vision_ttt.ops.gated_norm.definition import gated_norm_definition
from vision_ttt.ops.ttt_linear import contract as learner
from vision_ttt.ops.ttt_linear.definition import ttt_linear_definition


def fused_ttt_linear_definition(x: Inputs) -> Tensor:
    """See :func:`vision_ttt.ops.fused_ttt_linear.fused_ttt_linear`."""
    heads, dim = x.b0.shape
    k, q, v, gate = x.projected.split(list(x.widths), dim=-1)
    q = q if x.widths[1] else k
    reverse = x.reverse_heads * dim
    q = directional_conv1d_definition(
        convolution.Inputs(q, x.conv_q_weight, x.conv_q_bias, reverse)
    )
    k = directional_conv1d_definition(
        convolution.Inputs(k, x.conv_k_weight, x.conv_k_bias, reverse)
    )
    z, _, _ = ttt_linear_definition(
        learner.Inputs(
            *(view.unflatten(-1, (heads, dim)) for view in (q, k, v)),
            torch.sigmoid(x.rate_logits) * (x.base_learning_rate / dim),
            *(x.w0, x.b0, x.ln_weight, x.ln_bias),
            x.position_scale.repeat_interleave(heads // len(x.position_scale), dim=0),
            *(x.mini_batch_size, x.reverse_heads, x.inner_eps),
        )
    )
    gate = gate if x.widths[3] else None
    merged = merge.Inputs(z.flatten(2), gate, x.post_weight, x.post_bias, x.post_eps)
    return gated_norm_definition(merged)
