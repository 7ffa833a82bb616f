"""The public function of linear_pair and its registration."""

from __future__ import annotations

import math

from torch import Tensor

from vision_ttt.ops._op import Op
from vision_ttt.ops._torch_function import overridable
from vision_ttt.ops.linear_pair import cpu
from vision_ttt.ops.linear_pair.contract import (
    BACKWARD_CONTRACT,
    CONTRACT,
    PUBLIC_CONTRACT,
    Inputs,
)
from vision_ttt.ops.linear_pair.definition import linear_pair_definition

_TENSORS = "Tensor x, Tensor wide, Tensor narrow, Tensor narrow_bias"


def _fake(inputs: Inputs) -> tuple[Tensor, Tensor]:
    lead = inputs.x.shape[:-1]
    wide, narrow = inputs.wide.shape[0], inputs.narrow.shape[0]
    return inputs.x.new_empty(*lead, wide), inputs.x.new_empty(*lead, narrow)


def _flops(shapes: Inputs) -> int:
    """Two FLOPs per number of both weights and row of x."""
    return 2 * math.prod(shapes.x[:-1]) * (math.prod(shapes.wide) + math.prod(shapes.narrow))


OP = Op(
    "linear_pair",
    Inputs,
    PUBLIC_CONTRACT,
    linear_pair_definition,
    {"cpu": cpu.BACKEND},
    _fake,
    schema=f"({_TENSORS}) -> (Tensor, Tensor)",
    backward_schema=f"(Tensor grad_wide, Tensor grad_narrow, {_TENSORS}) "
    f"-> ({_TENSORS.replace('Tensor ', 'Tensor d')})",
    backward_contract=BACKWARD_CONTRACT,
    bare_contract=CONTRACT,
    results=2,
    autocast=("x", "wide", "narrow", "narrow_bias"),
    flops=_flops,
    backward_flops=lambda shapes: 2 * _flops(shapes),
)


@overridable
def linear_pair(x: Tensor, wide: Tensor, narrow: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """x Wᵀ and x Nᵀ + n: a wide linear layer and a narrow one of the same input.

    It is :func:`vision_ttt.ops.linear` twice, with few columns in the second layer. In float32 on
    a CPU, for sizes of x and W that are multiples of 16, the narrow layer reads the tokens and adds
    to their gradient while they are in the cache. All other calls run PyTorch's function.

    Args:
        x: [..., D].
        wide: W [C, D].
        narrow: N [M, D] and its bias n [M].

    Returns:
        [..., C] and [..., M], differentiable in every tensor.

    Raises:
        TypeError: a dtype or type is not accepted.
        ValueError: the shapes do not fit each other, or the requested backend does not support the
            call.
    """
    return OP(Inputs(x, wide, *narrow))
