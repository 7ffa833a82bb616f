"""The public function of linear and its registration."""

from __future__ import annotations

import math

from torch import Tensor

from vision_ttt.ops._op import Op
from vision_ttt.ops._torch_function import overridable
from vision_ttt.ops.linear import cpu
from vision_ttt.ops.linear.contract import BACKWARD_CONTRACT, CONTRACT, Inputs
from vision_ttt.ops.linear.definition import linear_definition


def _fake(inputs: Inputs) -> Tensor:
    x, weight, _ = inputs
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _flops(shapes: Inputs) -> int:
    """Two FLOPs per number of the weight and row of x."""
    return 2 * math.prod(shapes.x[:-1]) * math.prod(shapes.weight)


OP = Op(
    "linear",
    Inputs,
    CONTRACT,
    linear_definition,
    {"cpu": cpu.BACKEND},
    _fake,
    schema="(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    backward_schema="(Tensor grad, Tensor x, Tensor weight, Tensor? bias) "
    "-> (Tensor, Tensor, Tensor)",
    backward_contract=BACKWARD_CONTRACT,
    autocast=("x", "weight", "bias"),
    flops=_flops,
    backward_flops=lambda shapes: 2 * _flops(shapes),
)


@overridable
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b, as ``torch.nn.functional.linear`` computes it.

    In float32 on a CPU, for sizes that are multiples of 16, both passes use the matrix products of
    :func:`vision_ttt.for_inference`. All other calls run PyTorch's function.

    Args:
        x: [..., D].
        weight: W [C, D].
        bias: b [C], or None.

    Returns:
        [..., C], differentiable in every tensor.

    Raises:
        TypeError: a dtype or type is not accepted.
        ValueError: the shapes do not fit each other, or the requested backend does not support the
            call.
    """
    return OP(Inputs(x, weight, bias))
