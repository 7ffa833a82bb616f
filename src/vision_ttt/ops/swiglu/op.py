"""The public function of swiglu and its registration."""

from __future__ import annotations

from torch import Tensor

from vision_ttt.ops._op import Op
from vision_ttt.ops._torch_function import overridable
from vision_ttt.ops.swiglu import cpu, triton_backend
from vision_ttt.ops.swiglu.contract import BACKWARD_CONTRACT, CONTRACT, Inputs
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
        TypeError: x is not a tensor of a floating dtype.
        ValueError: x's last axis has an odd size, or the requested backend does not support x.
    """
    return OP(Inputs(x))
