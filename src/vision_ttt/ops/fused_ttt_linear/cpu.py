"""The custom op ``vision_ttt::fused_ttt_linear`` on the CPU kernels of the ops that it joins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from vision_ttt.ops._learner_kernels import add_shares
from vision_ttt.ops._native import are_servable, kernels_serve, require_servable
from vision_ttt.ops._second_derivative import derive_twice
from vision_ttt.ops.directional_conv1d.cpu import directional_conv1d_backward
from vision_ttt.ops.fused_ttt_linear.composition import fused_ttt_linear_composition
from vision_ttt.ops.fused_ttt_linear.contract import (
    BACKWARD_CONTRACT,
    CONTRACT,
    check,
    fits,
)
from vision_ttt.ops.fused_ttt_linear.reference import fused_ttt_linear_reference
from vision_ttt.ops.gated_norm.cpu import gated_norm_backward, gated_norm_forward
from vision_ttt.ops.ttt_linear.autograd import ttt_linear_backward_flops, ttt_linear_flops
from vision_ttt.ops.ttt_linear.cpu import Call
from vision_ttt.ops.ttt_linear.dual import num_checkpoints

_INPUTS = (
    "Tensor projected, Tensor rate_logits, Tensor conv_q_weight, Tensor conv_q_bias, "
    "Tensor conv_k_weight, Tensor conv_k_bias, Tensor w0, Tensor b0, Tensor ln_weight, "
    "Tensor ln_bias, Tensor position_scale, Tensor post_weight, Tensor post_bias"
)
_OPTIONS = (
    "int[] widths, SymInt mini_batch_size, int reverse_heads, float base_learning_rate, "
    "float inner_eps, float post_eps"
)


class _Inputs(NamedTuple):
    projected: Tensor
    rate_logits: Tensor
    conv_q_weight: Tensor
    conv_q_bias: Tensor
    conv_k_weight: Tensor
    conv_k_bias: Tensor
    w0: Tensor
    b0: Tensor
    ln_weight: Tensor
    ln_bias: Tensor
    position_scale: Tensor
    post_weight: Tensor
    post_bias: Tensor


class _Options(NamedTuple):
    widths: Sequence[int]
    mini_batch_size: int
    reverse_heads: int
    base_learning_rate: float
    inner_eps: float
    post_eps: float


def _fits(x: _Inputs, mini_batch_size: int) -> bool:
    """Whether the kernels take a layer of these sizes."""
    return fits(x.w0.shape[1], x.post_weight.shape[1], mini_batch_size)


def kernel_serves(tensors: Sequence[Tensor], mini_batch_size: int) -> bool:
    """Whether the kernel is to take these tensors, in the op's order."""
    x = _Inputs(*tensors)
    return _fits(x, mini_batch_size) and kernels_serve(*_read_as_they_are(x))


def _read_as_they_are(x: _Inputs) -> tuple[Tensor, ...]:
    """Of the others the kernels get copies in float32."""
    return x.projected, *x[2:6], x.post_weight, x.post_bias


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


def _call(x: _Inputs, options: _Options, columns: _Columns) -> Call:
    heads, dim, _ = x.w0.shape
    k, v = (view.unflatten(-1, (heads, dim)) for view in (columns.k, columns.v))
    q = k if columns.q is None else columns.q.unflatten(-1, (heads, dim))
    return Call(
        (q, k, v, x.rate_logits, x.w0, x.b0, x.ln_weight, x.ln_bias, x.position_scale),
        options.mini_batch_size,
        options.reverse_heads,
        options.inner_eps,
        options.base_learning_rate / dim,
        ((x.conv_q_weight, x.conv_q_bias), (x.conv_k_weight, x.conv_k_bias)),
    )


@torch.library.custom_op(
    "vision_ttt::fused_ttt_linear",
    mutates_args=(),
    schema=f"({_INPUTS}, {_OPTIONS}, bool keep) "
    "-> (Tensor out, Tensor z, Tensor kept_w, Tensor kept_b)",
)
def fused_ttt_linear_op(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute :func:`fused_ttt_linear`; with ``keep`` also what its backward needs."""
    x, options, keep = _Inputs(*args[:13]), _Options(*args[13:19]), args[19]
    check(CONTRACT, x, options.widths, options[1:])
    fits_it = _fits(x, options.mini_batch_size)
    if not keep and not (fits_it and are_servable(*_read_as_they_are(x))):
        # A program that was exported where the kernel serves, and runs where it does not.
        out = fused_ttt_linear_composition(*x, *options)
        batch, new = out.shape[0], out.new_empty
        return out, new(0), new(0, batch, *x.w0.shape), new(0, batch, *x.b0.shape)
    require_servable(CONTRACT.op, fits_it, *_read_as_they_are(x))
    columns = _Columns.of(x.projected.contiguous(), options.widths)
    z, _, _, kept_w, kept_b = _call(x, options, columns).forward(keep, last_state=False)
    z = z.flatten(2)  # [B, T, R · D]
    out = gated_norm_forward(z, columns.gate, x.post_weight, x.post_bias, options.post_eps)
    return out, z if keep else z.new_empty(0), kept_w, kept_b


@torch.library.custom_op(
    "vision_ttt::fused_ttt_linear_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {_INPUTS}, Tensor z, Tensor kept_w, Tensor kept_b, {_OPTIONS}) -> ("
    + _INPUTS.replace("Tensor ", "Tensor d")
    + ")",
)
def _backward_op(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
    x, (z, *kept), options = _Inputs(*args[:13]), args[13:16], _Options(*args[16:])
    check(BACKWARD_CONTRACT, (grad, *x, z, *kept), options.widths, options[1:])
    require_servable(
        BACKWARD_CONTRACT.op, _fits(x, options.mini_batch_size), grad, z, *_read_as_they_are(x)
    )
    heads, dim, _ = x.w0.shape
    states = num_checkpoints(z.shape[1], dim, options.mini_batch_size)
    if len(kept[0]) != states:
        raise ValueError(f"{BACKWARD_CONTRACT.op}: needs {states} kept states, got {len(kept[0])}")
    dprojected = x.projected.new_empty(x.projected.shape)
    columns = _Columns.of(x.projected.contiguous(), options.widths)
    into = _Columns.of(dprojected, options.widths)
    dz, dpost_weight, dpost_bias = gated_norm_backward(
        grad, (z, columns.gate, x.post_weight, x.post_bias), options.post_eps, into.gate
    )
    call = _call(x, options, columns)
    tokens = (*x.projected.shape[:2], heads, dim)
    dq, dk = grad.new_empty(tokens), grad.new_empty(tokens)  # of the convolved views
    no_states = (grad.new_zeros(tokens[0], *state.shape) for state in (x.w0, x.b0))
    shares = call.backward(
        (dz.view(tokens), *no_states), tuple(kept), (dq, dk, into.v.unflatten(-1, (heads, dim)))
    )
    # Neighbouring heads share a row of the position scale: their shares add up, too.
    shares[5] = shares[5].unflatten(1, (len(x.position_scale), -1)).sum(2)
    likes = x[1:2] + x[6:11]
    deta, *dparameters = (add_shares(*pair, grad) for pair in zip(shares, likes, strict=True))
    rate = torch.sigmoid(x.rate_logits)
    dlogits = deta * rate * (1 - rate) * (options.base_learning_rate / dim)
    reverse_channels = options.reverse_heads * dim

    def through_conv(d: Tensor, view: Tensor, weight: Tensor, dview: Tensor) -> tuple[Tensor, ...]:
        return directional_conv1d_backward(d.flatten(2), view, weight, reverse_channels, dview)

    dconv_k = through_conv(dk, columns.k, x.conv_k_weight, into.k)
    if columns.q is None:
        dk_too = dk.flatten(2)  # its memory is free again
        dconv_q = through_conv(dq, columns.k, x.conv_q_weight, dk_too)
        into.k.add_(dk_too)
    else:
        dconv_q = through_conv(dq, columns.q, x.conv_q_weight, into.q)
    return dprojected, dlogits, *dconv_q, *dconv_k, *dparameters, dpost_weight, dpost_bias


@fused_ttt_linear_op.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    x, options, keep = _Inputs(*args[:13]), _Options(*args[13:19]), args[19]
    batch, length, _ = x.projected.shape
    heads, dim, _ = x.w0.shape
    kept = num_checkpoints(length, dim, options.mini_batch_size) if keep else 0
    new = x.projected.new_empty
    return (
        new(batch, length, x.post_weight.shape[1]),
        new(batch, length, heads * dim) if keep else new(0),
        new(kept, batch, heads, dim, dim),
        new(kept, batch, heads, dim),
    )


@_backward_op.register_fake
def _(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in args[:13])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, z, kept_w, kept_b = output
    ctx.mark_non_differentiable(z, kept_w, kept_b)
    ctx.save_for_backward(*inputs[:13], z, kept_w, kept_b)
    ctx.options, ctx.kept = inputs[13:19], inputs[19]


def _backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    if not ctx.kept:
        raise RuntimeError("vision_ttt::fused_ttt_linear was called with keep=False: no backward")
    return *_backward_op(grad, *ctx.saved_tensors, *ctx.options), *[None] * 7


fused_ttt_linear_op.register_autograd(_backward, setup_context=_setup_context)
derive_twice(_backward_op, fused_ttt_linear_reference, tensors=13, unused=3)


def _sizes(shapes: Sequence[Sequence[int]]) -> tuple[list[int], int]:
    """Shape [B, T, H, d] of the views, and the FLOPs of their two convolutions."""
    x = _Inputs(*shapes)
    heads, dim, _ = x.w0
    views = [*x.projected[:2], heads, dim]
    return views, 4 * math.prod(views) * x.conv_q_weight[-1]


@register_flop_formula(torch.ops.vision_ttt.fused_ttt_linear)
def fused_ttt_linear_flops(*args: Any, **_: Any) -> int:
    """ttt_linear's, and two convolutions'."""
    views, convolutions = _sizes(args[:13])
    mini_batch_size = args[14]
    return ttt_linear_flops(views, *[None] * 8, mini_batch_size) + convolutions


@register_flop_formula(torch.ops.vision_ttt.fused_ttt_linear_backward)
def fused_ttt_linear_backward_flops(*args: Any, **_: Any) -> int:
    """ttt_linear's backward, and two convolutions' for the view and for the weights each."""
    views, convolutions = _sizes(args[1:14])
    mini_batch_size = args[18]
    return ttt_linear_backward_flops(views, *[None] * 13, mini_batch_size) + 2 * convolutions
