"""fused_ttt_linear on a CPU: the compiled kernels of its parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vision_ttt.ops import _native
from vision_ttt.ops._learner_cpu import LearnerCall, unsuited
from vision_ttt.ops._learner_dual import summed
from vision_ttt.ops._op import Backend
from vision_ttt.ops.fused_ttt_linear.contract import Inputs
from vision_ttt.ops.gated_norm import contract as merge
from vision_ttt.ops.gated_norm.cpu import gated_norm_backward, gated_norm_forward
from vision_ttt.ops.ttt_linear import contract as learner


def refusal(x: Inputs) -> str | None:
    """The reason why the kernels do not support the inputs, or None if they do."""
    sizes = unsuited(x.w0.shape[1], x.mini_batch_size) or _native.no_vectors(x.post_weight.shape[1])
    # The other tensors are copied to float32.
    as_they_are = x.projected, *x[2:6], x.post_weight, x.post_bias
    return sizes or _native.refusal(*as_they_are)


class _Columns(NamedTuple):
    """The parts of a projection [B, T, C], or of its gradient."""

    k: Tensor
    q: Tensor | None
    v: Tensor
    gate: Tensor | None

    @classmethod
    def of(cls, projected: Tensor, widths: Sequence[int]) -> _Columns:
        k, q, v, gate = projected.split(list(widths), dim=-1)
        return cls(k, q if widths[1] else None, v, gate if widths[3] else None)


def _call(x: Inputs, columns: _Columns) -> LearnerCall:
    heads, dim, _ = x.w0.shape
    k, v = (view.unflatten(-1, (heads, dim)) for view in (columns.k, columns.v))
    q = k if columns.q is None else columns.q.unflatten(-1, (heads, dim))
    inputs = learner.Inputs(
        *(q, k, v, x.rate_logits, x.w0, x.b0, x.ln_weight, x.ln_bias, x.position_scale),
        *(x.mini_batch_size, x.reverse_heads, x.inner_eps),
    )
    convolutions = ((x.conv_q_weight, x.conv_q_bias), (x.conv_k_weight, x.conv_k_bias))
    return LearnerCall(inputs, x.base_learning_rate / dim, convolutions)


def _to_merge(x: Inputs, z: Tensor, columns: _Columns) -> merge.Inputs:
    return merge.Inputs(z, columns.gate, x.post_weight, x.post_bias, x.post_eps)


def _forward(x: Inputs, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    columns = _Columns.of(x.projected.contiguous(), x.widths)
    z, kept_w, kept_b = _call(x, columns).forward(keep, last_state=False)
    z = z.flatten(2)  # [B, T, R · D]
    out = gated_norm_forward(_to_merge(x, z, columns))
    return out, z if keep else z.new_empty(0), kept_w, kept_b


def _backward(
    x: Inputs, grad: Tensor, z: Tensor, kept_w: Tensor, kept_b: Tensor
) -> tuple[Tensor, ...]:
    heads, dim, _ = x.w0.shape
    grad, z = grad.to(x.projected.dtype), z.to(x.projected.dtype)
    dprojected = x.projected.new_empty(x.projected.shape)
    columns = _Columns.of(x.projected.contiguous(), x.widths)
    into = _Columns.of(dprojected, x.widths)
    dz, dpost_weight, dpost_bias = gated_norm_backward(_to_merge(x, z, columns), grad, into.gate)
    no_states = (grad.new_zeros(len(grad), *state.shape) for state in (x.w0, x.b0))
    dq, dk, dv = (
        None if view is None else view.unflatten(-1, (heads, dim))
        for view in (into.q, into.k, into.v)
    )
    *shares, dtaps_q, dtaps_k = _call(x, columns).backward(
        (dz.unflatten(-1, (heads, dim)), *no_states), (kept_w, kept_b), (dq, dk, dv)
    )
    # Neighbouring heads share a row of the position scale, so its gradient is their sum.
    shares[5] = shares[5].unflatten(1, (len(x.position_scale), -1)).sum(2)
    likes = x[1:2] + x[6:11]
    dlogits, *dparameters = (summed(*pair, grad) for pair in zip(shares, likes, strict=True))
    dconvolutions = (part for taps in (dtaps_q, dtaps_k) for part in _weight_and_bias(taps))
    return dprojected, dlogits, *dconvolutions, *dparameters, dpost_weight, dpost_bias


def _weight_and_bias(shares: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of weight [H · d, 1, K] and bias [H · d], given the taps' [B, H, K + 1, d]."""
    taps = shares.sum(0).transpose(1, 2).flatten(0, 1)  # [H · d, K + 1]
    weight, bias = taps[:, None, :-1], taps[:, -1]
    return tuple(x.clone(memory_format=torch.contiguous_format) for x in (weight, bias))


BACKEND = Backend(_forward, _backward, refusal)
