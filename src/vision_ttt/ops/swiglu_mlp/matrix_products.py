"""swiglu_mlp by PyTorch's matrix products, with the op swiglu between them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from vision_ttt.ops import _triton
from vision_ttt.ops._op import Backend
from vision_ttt.ops.swiglu import contract as activation
from vision_ttt.ops.swiglu import swiglu
from vision_ttt.ops.swiglu.op import OP as SWIGLU
from vision_ttt.ops.swiglu_mlp import cpu
from vision_ttt.ops.swiglu_mlp.contract import Inputs
from vision_ttt.ops.swiglu_mlp.definition import layer_norm

TOKENS_AT_ONCE = 1024
"""Tokens of a chunk on a CPU: small enough for the cache."""


def parts(x: Tensor, axis: int = 0) -> Iterator[slice]:
    """Yield the chunks of x's tokens along an axis."""
    length = x.shape[axis]
    size = TOKENS_AT_ONCE if x.is_cpu else max(length, 1)
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _normed(rows: Tensor, inputs: Inputs) -> Tensor:
    if inputs.norm_weight is None:
        return rows
    return layer_norm(rows, inputs.norm_weight, inputs.norm_bias, inputs.eps)


def _forward(inputs: Inputs) -> Tensor:
    x, up, down = inputs[:3]
    tokens = _rows(x)
    out = x.new_empty(tokens.shape[0], down.shape[0])
    for part in parts(tokens):
        torch.mm(swiglu(_normed(tokens[part], inputs) @ up.t()), down.t(), out=out[part])
        if inputs.residual:
            out[part] += tokens[part]
    return out.view(*x.shape[:-1], down.shape[0])


def _backward(inputs: Inputs, grad: Tensor) -> tuple[Tensor, ...]:
    x, up, down = inputs[:3]
    grads, tokens = _rows(grad), _rows(x)
    dx = x.new_empty(tokens.shape)
    # The sums over chunks are at least float32. Autograd would compute each sum in one product.
    precision = torch.promote_types(x.dtype, torch.float32)
    dup, ddown, *dnorm = (
        x.new_empty(0) if w is None else w.new_zeros(w.shape, dtype=precision) for w in inputs[1:5]
    )
    for part in parts(tokens):
        normed = _normed(tokens[part], inputs)
        hidden = normed @ up.t()  # [n, 2 H]
        ddown += grads[part].t() @ swiglu(hidden)
        dhidden = swiglu_backward(grads[part] @ down, hidden)
        dup += dhidden.t() @ normed
        torch.mm(dhidden, up, out=dx[part])
        if inputs.norm_weight is not None:
            dx[part], *shares = _layer_norm_backward(dx[part], tokens[part], inputs)
            for total, share in zip(dnorm, shares, strict=True):
                total += share
        if inputs.residual:
            dx[part] += grads[part]
    sums = (
        total if w is None else total.to(w.dtype)
        for total, w in zip((dup, ddown, *dnorm), inputs[1:5], strict=True)
    )
    return dx.view(x.shape), *sums


def _layer_norm_backward(grad: Tensor, rows: Tensor, inputs: Inputs) -> tuple[Tensor, ...]:
    """The gradients of LN's rows, weight and bias; the last two are at least float32."""
    precision = torch.promote_types(rows.dtype, torch.float32)
    x, grad = rows.to(precision), grad.to(precision)
    weight, bias = (w.to(precision) for w in (inputs.norm_weight, inputs.norm_bias))
    shape = list(rows.shape[-1:])
    _, mean, scale = torch.native_layer_norm(x, shape, weight, bias, inputs.eps)
    every = [True, True, True]
    return torch.ops.aten.native_layer_norm_backward(
        grad, x, shape, mean, scale, weight, bias, every
    )


def swiglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of swiglu's argument x [..., 2 H]."""
    if SWIGLU.choose(activation.Inputs(x)) in SWIGLU.backends:
        return SWIGLU.backward_op(grad, x)
    precision = torch.promote_types(x.dtype, torch.float32)
    return swiglu_gradient(grad, x.to(precision)).to(x.dtype)


def swiglu_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """The same by differentiable operations."""
    a, b = x.chunk(2, dim=-1)
    s = a.sigmoid()
    silu = a * s
    return torch.cat((grad * b * (s + silu * (1 - s)), grad * silu), dim=-1)


BACKENDS = {
    "cpu": cpu.BACKEND,
    "triton": Backend(_forward, _backward, lambda inputs: _triton.refusal(inputs.x)),
    "dual": Backend(_forward, _backward, lambda inputs: None),
}
