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

TOKENS_AT_ONCE = 1024
"""Tokens of a chunk on a CPU."""


def _parts(x: Tensor) -> Iterator[slice]:
    """Yield the chunks of rows of x [N, D]."""
    rows = x.shape[0]
    size = TOKENS_AT_ONCE if x.is_cpu else max(rows, 1)
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _forward(inputs: Inputs) -> Tensor:
    x, up, down = inputs
    tokens = _rows(x)
    out = x.new_empty(tokens.shape[0], down.shape[0])
    for part in _parts(tokens):
        torch.mm(swiglu(tokens[part] @ up.t()), down.t(), out=out[part])
    return out.view(*x.shape[:-1], down.shape[0])


def _backward(inputs: Inputs, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, up, down = inputs
    grads, tokens = _rows(grad), _rows(x)
    dx = x.new_empty(tokens.shape)
    # The sums over chunks are at least float32. Autograd would compute each sum in one product.
    precision = torch.promote_types(x.dtype, torch.float32)
    dup, ddown = (w.new_zeros(w.shape, dtype=precision) for w in (up, down))
    for part in _parts(tokens):
        hidden = tokens[part] @ up.t()  # [n, 2 H]
        ddown += grads[part].t() @ swiglu(hidden)
        dhidden = _swiglu_backward(grads[part] @ down, hidden)
        dup += dhidden.t() @ tokens[part]
        torch.mm(dhidden, up, out=dx[part])
    return dx.view(x.shape), dup.to(up.dtype), ddown.to(down.dtype)


def _swiglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of swiglu's argument x [N, 2 H]."""
    if SWIGLU.choose(activation.Inputs(x)) in SWIGLU.backends:
        return SWIGLU.backward_op(grad, x)
    precision = torch.promote_types(x.dtype, torch.float32)
    a, b = x.to(precision).chunk(2, dim=-1)
    s = a.sigmoid()
    return torch.cat((grad * b * s * (1 + a * (1 - s)), grad * a * s), dim=-1).to(x.dtype)


BACKENDS = {
    "cpu": cpu.BACKEND,
    "triton": Backend(_forward, _backward, lambda inputs: _triton.refusal(inputs.x)),
    "dual": Backend(_forward, _backward, lambda inputs: None),
}
