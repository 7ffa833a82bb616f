"""The public function of swiglu_mlp and its registration."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from vision_ttt.ops._backend import autocast_kind
from vision_ttt.ops._op import Op
from vision_ttt.ops._torch_function import overridable
from vision_ttt.ops.swiglu_mlp.contract import BACKWARD_CONTRACT, CONTRACT, Inputs
from vision_ttt.ops.swiglu_mlp.definition import layer_norm, swiglu_mlp_definition
from vision_ttt.ops.swiglu_mlp.matrix_products import BACKENDS

_TENSORS = "Tensor x, Tensor up, Tensor down, Tensor? norm_weight, Tensor? norm_bias"
_OPTIONS = "bool residual, float eps"


def _fake(inputs: Inputs) -> Tensor:
    return inputs.x.new_empty(*inputs.x.shape[:-1], inputs.down.shape[0])


def _flops(shapes: Any) -> int:
    """FLOPs of both matrix products, of arguments with these shapes."""
    return 2 * math.prod(shapes.x[:-1]) * (math.prod(shapes.up) + math.prod(shapes.down))


def _backward_flops(shapes: Any) -> int:
    """FLOPs of two products per product of the forward pass, and of the first one's replay."""
    return 2 * math.prod(shapes.x[:-1]) * (3 * math.prod(shapes.up) + 2 * math.prod(shapes.down))


OP = Op(
    "swiglu_mlp",
    Inputs,
    CONTRACT,
    swiglu_mlp_definition,
    BACKENDS,
    _fake,
    schema=f"({_TENSORS}, {_OPTIONS}) -> Tensor",
    backward_schema=f"(Tensor grad, {_TENSORS}, {_OPTIONS}) "
    "-> (Tensor dx, Tensor dup, Tensor ddown, Tensor dnorm_weight, Tensor dnorm_bias)",
    backward_contract=BACKWARD_CONTRACT,
    autocast=("x", "up", "down"),
    flops=_flops,
    backward_flops=_backward_flops,
)


@overridable
def swiglu_mlp(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    norm: tuple[Tensor, Tensor] | None = None,
    residual: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """(SiLU(a) ⊙ b) W_downᵀ with [a, b] = x W_upᵀ, the MLP of Vision-TTT's Eq. 9.

    With ``norm`` and ``residual`` it is the equation's second line, x + MLP(LN(x)).

    Only the arguments are saved for the backward pass, which computes the hidden layer again: that
    is by far the largest tensor of a Vittt block. On a CPU the tokens are processed in chunks, so
    that the hidden layer and the normed tokens stay in the cache.

    Args:
        x: [..., D].
        up: [2 H, D], gate and value.
        down: [E, H].
        norm: weight and bias [D] of a LayerNorm of x before the first product; None for no norm.
        residual: add x to the result; E is D. Under autocast the norm and the sum are in x's dtype.
        eps: added to the norm's variance.

    Returns:
        [..., E], differentiable in every tensor.

    Raises:
        TypeError: a dtype or type is not accepted.
        ValueError: the shapes do not fit each other, or the requested backend does not support the
            call.
    """
    if norm is not None and not isinstance(norm, (tuple, list)):
        kind = type(norm).__name__
        raise TypeError(f"swiglu_mlp: norm must be weight and bias as a pair, or None, got {kind}")
    weight, bias = (None, None) if norm is None else norm
    inputs = Inputs(x, up, down, weight, bias, residual, eps)
    casts = isinstance(x, Tensor) and torch.is_autocast_enabled(autocast_kind(x))
    if (norm is None and not residual) or not casts:
        return OP(inputs)
    # Autocast casts what is multiplied; norms and sums stay as precise as x is.
    CONTRACT.check(inputs)
    normed = x if norm is None else layer_norm(x, weight, bias, eps)
    branch = OP(Inputs(normed, up, down))
    return x + branch if residual else branch
