"""The definition of fused_ttt_linear: its parts' definitions one after the other, or their ops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vision_ttt.ops.directional_conv1d.contract import Inputs as Convolution
from vision_ttt.ops.directional_conv1d.definition import directional_conv1d_definition
from vision_ttt.ops.directional_conv1d.op import OP as CONVOLUTION
from vision_ttt.ops.fused_ttt_linear.contract import Inputs
from vision_ttt.ops.gated_norm.contract import Inputs as Merge
from vision_ttt.ops.gated_norm.definition import gated_norm_definition
from vision_ttt.ops.gated_norm.op import OP as MERGE
from vision_ttt.ops.ttt_linear.contract import Inputs as Learner
from vision_ttt.ops.ttt_linear.definition import ttt_linear_definition
from vision_ttt.ops.ttt_linear.op import OP as LEARNER


def _compose(
    x: Inputs,
    convolve: Callable[[Convolution], Tensor],
    learn: Callable[[Learner], Any],
    merge: Callable[[Merge], Tensor],
) -> Tensor:
    heads, dim = x.b0.shape
    k, q, v, gate = x.projected.split(list(x.widths), dim=-1)
    q, reverse = q if x.widths[1] else k, x.reverse_heads * dim
    q = convolve(Convolution(q, x.conv_q_weight, x.conv_q_bias, reverse))
    k = convolve(Convolution(k, x.conv_k_weight, x.conv_k_bias, reverse))
    # Rates are at least float32, for views of any precision.
    logits = x.rate_logits.to(torch.promote_types(x.rate_logits.dtype, torch.float32))
    inputs = Learner(
        *(view.unflatten(-1, (heads, dim)) for view in (q, k, v)),
        torch.sigmoid(logits) * (x.base_learning_rate / dim),
        *(x.w0, x.b0, x.ln_weight, x.ln_bias),
        x.position_scale.repeat_interleave(heads // len(x.position_scale), dim=0),
        *(x.mini_batch_size, x.reverse_heads, x.inner_eps),
    )
    z = learn(inputs)[0].flatten(2)
    return merge(Merge(z, gate if x.widths[3] else None, x.post_weight, x.post_bias, x.post_eps))


def fused_ttt_linear_definition(x: Inputs) -> Tensor:
    """See :func:`vision_ttt.ops.fused_ttt_linear.fused_ttt_linear`."""
    return _compose(x, directional_conv1d_definition, ttt_linear_definition, gated_norm_definition)


def fused_ttt_linear_composition(x: Inputs) -> Tensor:
    """The same by other ops, each with backends of its own."""
    return _compose(x, CONVOLUTION, partial(LEARNER, wanted=1), MERGE)
