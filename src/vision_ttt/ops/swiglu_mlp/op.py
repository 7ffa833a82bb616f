"""The custom op ``vision_ttt::swiglu_mlp``: matrix products, and swiglu's kernels between them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from vision_ttt.ops._native import kernels_serve
from vision_ttt.ops._second_derivative import derive_twice
from vision_ttt.ops._triton import triton_serves
from vision_ttt.ops.swiglu import swiglu
from vision_ttt.ops.swiglu.cpu import fits, swiglu_backward_op
from vision_ttt.ops.swiglu_mlp.contract import BACKWARD_CONTRACT, CONTRACT
from vision_ttt.ops.swiglu_mlp.definition import swiglu_mlp_definition

TOKENS_AT_ONCE = 1024
"""A CPU works on so many before it takes the next."""


def _parts(x: Tensor) -> Iterator[slice]:
    """The rows of x [N, D] that are worked on at once."""
    rows = x.shape[0]
    size = TOKENS_AT_ONCE if x.is_cpu else max(rows, 1)
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


@torch.library.custom_op("vision_ttt::swiglu_mlp", mutates_args=())
@CONTRACT.guards
def swiglu_mlp_op(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """See :func:`vision_ttt.ops.swiglu_mlp`."""
    tokens = _rows(x)
    out = x.new_empty(tokens.shape[0], down.shape[0])
    for part in _parts(tokens):
        torch.mm(swiglu(tokens[part] @ up.t()), down.t(), out=out[part])
    return out.view(*x.shape[:-1], down.shape[0])


@torch.library.custom_op("vision_ttt::swiglu_mlp_backward", mutates_args=())
@BACKWARD_CONTRACT.guards
def swiglu_mlp_backward_op(
    grad: torch.Tensor, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, up and down."""
    grads, tokens = _rows(grad), _rows(x)
    dx = x.new_empty(tokens.shape)
    # Sums over tokens are at least float32; autograd's are one product, these are some.
    precision = torch.promote_types(x.dtype, torch.float32)
    dup, ddown = (torch.zeros_like(w, dtype=precision) for w in (up, down))
    for part in _parts(tokens):
        hidden = tokens[part] @ up.t()  # [n, 2 H]
        ddown += grads[part].t() @ swiglu(hidden)
        dhidden = _swiglu_backward(grads[part] @ down, hidden)
        dup += dhidden.t() @ tokens[part]
        torch.mm(dhidden, up, out=dx[part])
    return dx.view(x.shape), dup.to(up.dtype), ddown.to(down.dtype)


def _swiglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of swiglu's argument x [N, 2 H]."""
    if (kernels_serve(grad, x) and fits(x)) or triton_serves(grad, x):
        return swiglu_backward_op(grad, x)
    precision = torch.promote_types(x.dtype, torch.float32)
    a, b = x.to(precision).chunk(2, dim=-1)
    s = a.sigmoid()
    return torch.cat((grad * b * s * (1 + a * (1 - s)), grad * a * s), dim=-1).to(x.dtype)


@swiglu_mlp_op.register_fake
def _(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], down.shape[0])


@swiglu_mlp_backward_op.register_fake
def _(grad: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in tensors)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
    return swiglu_mlp_backward_op(grad, *ctx.saved_tensors)


swiglu_mlp_op.register_autograd(_backward, setup_context=_setup_context)
derive_twice(swiglu_mlp_backward_op, swiglu_mlp_definition, tensors=3)


@register_flop_formula(torch.ops.vision_ttt.swiglu_mlp)
def swiglu_mlp_flops(
    x_shape: Sequence[int], up_shape: Sequence[int], down_shape: Sequence[int], **_: Any
) -> int:
    """Both matrix products."""
    return 2 * math.prod(x_shape[:-1]) * (math.prod(up_shape) + math.prod(down_shape))


@register_flop_formula(torch.ops.vision_ttt.swiglu_mlp_backward)
def swiglu_mlp_backward_flops(
    grad_shape: Sequence[int],
    x_shape: Sequence[int],
    up_shape: Sequence[int],
    down_shape: Sequence[int],
    **_: Any,
) -> int:
    """As many for the input and for the weights each, and the first product again."""
    tokens = math.prod(x_shape[:-1])
    return 2 * tokens * (3 * math.prod(up_shape) + 2 * math.prod(down_shape))
