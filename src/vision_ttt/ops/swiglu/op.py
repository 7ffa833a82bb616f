"""The public op: what it computes, and who computes it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops._native import require_servable
from vision_ttt.ops._op import Op
from vision_ttt.ops._overriding import overridable
from vision_ttt.ops.swiglu import cpu, triton_backend
from vision_ttt.ops.swiglu.contract import BACKWARD_CONTRACT, CONTRACT, IN_PLACE_CONTRACT, Inputs
from vision_ttt.ops.swiglu.definition import swiglu_definition


def _fake(inputs: Inputs) -> Tensor:
    x = inputs.x
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


OP = Op(
    "swiglu",
    Inputs,
    CONTRACT,
    swiglu_definition,
    {"cpu": cpu.BACKEND, "triton": triton_backend.BACKEND},
    _fake,
    schema="(Tensor x) -> Tensor",
    backward_schema="(Tensor grad, Tensor x) -> Tensor",
    backward_contract=BACKWARD_CONTRACT,
)


@overridable
def swiglu(x: Tensor) -> Tensor:
    """SiLU(a) ⊙ b of x's halves a, b along the last axis: [..., 2 H] → [..., H].

    Raises:
        TypeError: x is no tensor of a floating dtype.
        ValueError: x's last axis has no halves, or the backend asked for cannot serve.
    """
    return OP(Inputs(x))


def swiglu_(x: Tensor) -> Tensor:
    """:func:`swiglu` for inference: where that is faster in x's own memory, of which it is a view.

    On a GPU it is not: the matrix product that follows reads a dense tensor, of half the memory.

    Args:
        x: [..., 2 H], contiguous, with no gradient to come. Its values may be gone.

    Raises:
        TypeError, ValueError: as :func:`swiglu`; x is not contiguous.
    """
    inputs = Inputs(x)
    IN_PLACE_CONTRACT.check(inputs)
    backend = OP.choose(inputs)
    if backend == "triton":
        return OP.forward_op(x)
    gate, value = x.chunk(2, dim=-1)
    if backend == "cpu":
        swiglu_in_place_op(x)
        return gate
    return F.silu(gate, inplace=True).mul_(value)


@torch.library.custom_op("vision_ttt::swiglu_", mutates_args=("x",))
def swiglu_in_place_op(x: torch.Tensor) -> None:
    """Write the result over the first half of x, contiguous."""
    inputs = Inputs(x)
    IN_PLACE_CONTRACT.check(inputs)
    require_servable(IN_PLACE_CONTRACT.op, cpu.refusal(inputs))
    cpu.write(x, x)


@swiglu_in_place_op.register_fake
def _(x: Tensor) -> None:
    return None
