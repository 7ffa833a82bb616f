"""The fused op: what it computes, and the way to the kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vision_ttt.ops._overriding import overridable
from vision_ttt.ops.fused_ttt_linear.composition import fused_ttt_linear_composition
from vision_ttt.ops.fused_ttt_linear.contract import CONTRACT, check
from vision_ttt.ops.fused_ttt_linear.cpu import fused_ttt_linear_op, kernel_serves


@overridable
def fused_ttt_linear(
    projected: Tensor,
    rate_logits: Tensor,
    conv_q: tuple[Tensor, Tensor],
    conv_k: tuple[Tensor, Tensor],
    state: tuple[Tensor, Tensor],
    inner_norm: tuple[Tensor, Tensor],
    position_scale: Tensor,
    post_norm: tuple[Tensor, Tensor],
    *,
    widths: Sequence[int],
    mini_batch_size: int,
    reverse_heads: int,
    base_learning_rate: float,
    inner_eps: float,
    post_eps: float,
) -> Tensor:
    """All of a TTT-Linear layer between its projections (Vision-TTT, Algorithm 1, lines 8-20).

    The composition, in this order, of ``directional_conv1d`` on q and on k, the rates
    η = η_base σ(logits) / d, :func:`vision_ttt.ops.ttt_linear` and ``gated_norm``. In one op the
    convolved views are never written to memory, and the views' gradients land side by side in that
    of the projection. That op is for float32 on a CPU; elsewhere the composition itself runs.

    Args:
        projected: [B, T, C], the columns of k, q, v and the gate side by side.
        rate_logits: [B, T, H].
        conv_q, conv_k: weight [H · d, 1, K] and bias [H · d] of the Conv1d of each.
        state: W₀ [H, d, d] and b₀ [H, d].
        inner_norm: weight and bias [H, d].
        position_scale: p [S, b]; each of its S rows serves H / S neighbouring heads.
        post_norm: weight and bias [R, D] of the post norm of each of R directions.
        widths: columns of k, q, v and the gate in C: 0 for a q that k serves for, and for no gate.
        mini_batch_size: b.
        reverse_heads: the last this-many heads scan from T to 1.
        base_learning_rate: η_base.
        inner_eps, post_eps: added to the norms' variances.

    Returns:
        [B, T, D] with D = H · d / R, differentiable in every tensor.

    Raises:
        TypeError: a dtype or type is not accepted.
        ValueError: the tensors and numbers are not those of one layer.
    """
    tensors = (projected, rate_logits, *conv_q, *conv_k, *state, *inner_norm, position_scale)
    tensors = (*tensors, *post_norm)
    numbers = mini_batch_size, reverse_heads, base_learning_rate, inner_eps, post_eps
    check(CONTRACT, tensors, widths, numbers)
    if not kernel_serves(tensors, mini_batch_size):
        return fused_ttt_linear_composition(*tensors, widths, *numbers)
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    out, *_ = fused_ttt_linear_op(*tensors, list(widths), *numbers, keep)
    return out
