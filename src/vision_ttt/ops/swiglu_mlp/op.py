"""The public op: what it computes, and who computes it."""

from __future__ import annotations

import math

from torch import Tensor

from vision_ttt.ops._op import Op
from vision_ttt.ops._overriding import overridable
from vision_ttt.ops.swiglu_mlp.contract import (
    BACKWARD_CONTRACT,
    CONTRACT,
    PUBLIC_CONTRACT,
    Inputs,
)
from vision_ttt.ops.swiglu_mlp.definition import swiglu_mlp_definition
from vision_ttt.ops.swiglu_mlp.products import BACKENDS


def _fake(inputs: Inputs) -> Tensor:
    x, _, down = inputs
    return x.new_empty(*x.shape[:-1], down.shape[0])


def _flops(shapes: Inputs) -> int:
    """Both matrix products."""
    return 2 * math.prod(shapes.x[:-1]) * (math.prod(shapes.up) + math.prod(shapes.down))


def _backward_flops(shapes: Inputs) -> int:
    """As many for the input and for the weights each, and the first product again."""
    return 2 * math.prod(shapes.x[:-1]) * (3 * math.prod(shapes.up) + 2 * math.prod(shapes.down))


OP = Op(
    "swiglu_mlp",
    Inputs,
    PUBLIC_CONTRACT,
    swiglu_mlp_definition,
    BACKENDS,
    _fake,
    schema="(Tensor x, Tensor up, Tensor down) -> Tensor",
    backward_schema="(Tensor grad, Tensor x, Tensor up, Tensor down) -> (Tensor, Tensor, Tensor)",
    backward_contract=BACKWARD_CONTRACT,
    bare_contract=CONTRACT,
    autocast=("x", "up", "down"),
    flops=_flops,
    backward_flops=_backward_flops,
)


@overridable
def swiglu_mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """(SiLU(a) ⊙ b) W_downᵀ with [a, b] = x W_upᵀ, the MLP of Vision-TTT's Eq. 9.

    Nothing but its arguments is kept for the backward pass, which computes the hidden layer again:
    of a Vittt block's tensors that is the largest by far. On a CPU some tokens are worked on after
    the others, so that what lies between the products stays near the cores.

    Args:
        x: [..., D].
        up: [2 H, D], gate and value.
        down: [E, H].

    Returns:
        [..., E], differentiable in every tensor.

    Raises:
        TypeError: a dtype or type is not accepted.
        ValueError: the shapes do not fit each other, or the backend asked for cannot serve.
    """
    return OP(Inputs(x, up, down))
