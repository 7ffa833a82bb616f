"""The public function of swiglu_mlp and its registration."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from vision_ttt.ops._op import Op
from vision_ttt.ops._torch_function import overridable
from vision_ttt.ops.swiglu_mlp.contract import (
    BACKWARD_CONTRACT,
    CONTRACT,
    PUBLIC_CONTRACT,
    Inputs,
)
from vision_ttt.ops.swiglu_mlp.definition import swiglu_mlp_definition
from vision_ttt.ops.swiglu_mlp.matrix_products import BACKENDS


def _fake(inputs: Inputs) -> Tensor:
    x, _, down = inputs
    return x.new_empty(*x.shape[:-1], down.shape[0])


def swiglu_mlp_flops(shapes: Any) -> int:
    """FLOPs of both matrix products, of arguments with the shapes x, up and down."""
    return 2 * math.prod(shapes.x[:-1]) * (math.prod(shapes.up) + math.prod(shapes.down))


def swiglu_mlp_backward_flops(shapes: Any) -> int:
    """FLOPs of two products per product of the forward pass, and of the first one's replay."""
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
    flops=swiglu_mlp_flops,
    backward_flops=swiglu_mlp_backward_flops,
)


@overridable
def swiglu_mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """(SiLU(a) ⊙ b) W_downᵀ with [a, b] = x W_upᵀ, the MLP of Vision-TTT's Eq. 9.

    Only the arguments are saved for the backward pass, which computes the hidden layer again: that
    is by far the largest tensor of a Vittt block. On a CPU the tokens are processed in chunks, so
    that the hidden layer stays in the cache.

    Args:
        x: [..., D].
        up: [2 H, D], gate and value.
        down: [E, H].

    Returns:
        [..., E], differentiable in every tensor.

    Raises:
        TypeError: a dtype or type is not accepted.
        ValueError: the shapes do not fit each other, or the requested backend does not support the
            call.
    """
    return OP(Inputs(x, up, down))
