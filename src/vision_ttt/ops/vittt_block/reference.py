"""The definition of vittt_block, in PyTorch's operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops.depthwise_conv2d.reference import depthwise_conv2d_reference
from vision_ttt.ops.fused_ttt_linear.reference import fused_ttt_linear_reference
from vision_ttt.ops.swiglu.reference import swiglu_reference


def vittt_block_reference(
    y: Tensor,
    parameters: Sequence[Tensor],
    height: int,
    width: int,
    q_columns: int,
    gate_columns: int,
    base_learning_rate: float,
    eps: Sequence[float],
) -> Tensor:
    """See :func:`vision_ttt.ops.vittt_block.vittt_block`."""
    conv2d, norm_weight, norm_bias, in_proj, rate_weight, rate_bias, *inner = parameters[:17]
    out_proj, mlp_norm_weight, mlp_norm_bias, fc1, fc2 = parameters[17:]
    *convolutions_state_and_norm, offset, post_weight, post_bias = inner
    norm_eps, inner_eps, post_eps, mlp_norm_eps = eps
    directions, mini_batch_size = offset.shape
    heads, columns = rate_bias.shape[0], directions * y.shape[-1]

    y = y + depthwise_conv2d_reference(y, conv2d, height, width)
    x = F.layer_norm(y, norm_weight.shape, norm_weight, norm_bias, norm_eps)
    steps = torch.arange(1, mini_batch_size + 1, dtype=offset.dtype, device=offset.device)
    mixed = fused_ttt_linear_reference(
        F.linear(x, in_proj),
        F.linear(x, rate_weight, rate_bias),
        *convolutions_state_and_norm,
        (1 / steps + offset).clamp(min=0),
        *(post_weight, post_bias),
        (columns, q_columns, columns, gate_columns),
        mini_batch_size,
        heads // directions * (directions - 1),
        *(base_learning_rate, inner_eps, post_eps),
    )
    y = y + F.linear(mixed, out_proj)
    x = F.layer_norm(y, mlp_norm_weight.shape, mlp_norm_weight, mlp_norm_bias, mlp_norm_eps)
    return y + F.linear(swiglu_reference(F.linear(x, fc1)), fc2)
