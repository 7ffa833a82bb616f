"""The public function of fused_ttt_linear and its registration."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from vision_ttt.ops._learner_dual import num_checkpoints
from vision_ttt.ops._learner_op import learner_backward_flops, learner_flops
from vision_ttt.ops._op import Op
from vision_ttt.ops._torch_function import overridable
from vision_ttt.ops.fused_ttt_linear import cpu
from vision_ttt.ops.fused_ttt_linear.contract import BACKWARD_CONTRACT, CONTRACT, Inputs
from vision_ttt.ops.fused_ttt_linear.definition import (
    fused_ttt_linear_composition,
    fused_ttt_linear_definition,
)
from vision_ttt.ops.ttt_linear import contract as learner

_TENSORS = ", ".join(f"Tensor {name}" for name in CONTRACT.tensors)
_OPTIONS = (
    "int[] widths, SymInt mini_batch_size, int reverse_heads, float base_learning_rate, "
    "float inner_eps, float post_eps"
)


def _kept(x: Inputs) -> int:
    return num_checkpoints(x.projected.shape[1], x.w0.shape[1], x.mini_batch_size)


def _fake(x: Inputs, keep: bool) -> tuple[Tensor, ...]:
    batch, length, _ = x.projected.shape
    heads, dim, _ = x.w0.shape
    kept, new = _kept(x) if keep else 0, x.projected.new_empty
    return (
        new(batch, length, x.post_weight.shape[1]),
        new(batch, length, heads * dim) if keep else new(0),
        new(kept, batch, heads, dim, dim),
        new(kept, batch, heads, dim),
    )


def _inner(shapes: Inputs) -> tuple[learner.Inputs, int]:
    """The shapes of ttt_linear's inputs, and the FLOPs of the two convolutions."""
    heads, dim, _ = shapes.w0
    views = [*shapes.projected[:2], heads, dim]
    inner = learner.Inputs(views, *[None] * 8, shapes.mini_batch_size, 0, 0.0)
    return inner, 4 * math.prod(views) * shapes.conv_q_weight[-1]


def _flops(shapes: Inputs) -> int:
    """FLOPs of ttt_linear and of two convolutions."""
    inner, convolutions = _inner(shapes)
    return learner_flops(inner) + convolutions


def _backward_flops(shapes: Inputs) -> int:
    """FLOPs of ttt_linear's backward pass, and twice those of the convolutions: views, weights."""
    inner, convolutions = _inner(shapes)
    return learner_backward_flops(inner) + 2 * convolutions


OP = Op(
    "fused_ttt_linear",
    Inputs,
    CONTRACT,
    fused_ttt_linear_definition,
    {"cpu": cpu.BACKEND},
    _fake,
    schema=f"({_TENSORS}, {_OPTIONS}, bool keep) "
    "-> (Tensor out, Tensor z, Tensor kept_w, Tensor kept_b)",
    backward_schema=f"(Tensor grad, {_TENSORS}, Tensor z, Tensor kept_w, Tensor kept_b, {_OPTIONS})"
    f" -> ({_TENSORS.replace('Tensor ', 'Tensor d')})",
    backward_contract=BACKWARD_CONTRACT,
    kept=_kept,
    composition=fused_ttt_linear_composition,
    flops=_flops,
    backward_flops=_backward_flops,
)


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

    It is the composition, in this order, of ``directional_conv1d`` on q and on k, the rates
    η = η_base σ(logits) / d, :func:`vision_ttt.ops.ttt_linear` and ``gated_norm``. The fused kernel
    never writes the convolved views to memory, and writes the views' gradients directly into the
    projection's. It supports float32 on a CPU; all other calls run the composition.

    Args:
        projected: [B, T, C], the columns of k, q, v and the gate side by side.
        rate_logits: [B, T, H].
        conv_q, conv_k: weight [H · d, 1, K] and bias [H · d] of the Conv1d of each.
        state: W₀ [H, d, d] and b₀ [H, d].
        inner_norm: weight and bias [H, d].
        position_scale: p [S, b]; each of its S rows applies to H / S neighbouring heads.
        post_norm: weight and bias [R, D] of the post norm of each of R directions.
        widths: numbers of columns of k, q, v and the gate in C. The width of q is 0 where q is k,
            that of the gate is 0 without a gate.
        mini_batch_size: b.
        reverse_heads: the last this-many heads scan from T to 1.
        base_learning_rate: η_base.
        inner_eps, post_eps: added to the norms' variances.

    Returns:
        [B, T, D] with D = H · d / R, differentiable in every tensor.

    Raises:
        TypeError: a dtype or type is not accepted.
        ValueError: the tensors and numbers do not fit one layer.
    """
    pairs = (*conv_q, *conv_k, *state, *inner_norm, position_scale, *post_norm)
    options = mini_batch_size, reverse_heads, base_learning_rate, inner_eps, post_eps
    return OP(Inputs(projected, rate_logits, *pairs, tuple(widths), *options))
