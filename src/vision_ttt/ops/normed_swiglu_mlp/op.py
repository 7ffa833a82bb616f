"""The public function of normed_swiglu_mlp and its registration."""

from __future__ import annotations

from torch import Tensor

from vision_ttt.ops._op import Op
from vision_ttt.ops._torch_function import overridable
from vision_ttt.ops.normed_swiglu_mlp import cpu
from vision_ttt.ops.normed_swiglu_mlp.contract import (
    BACKWARD_CONTRACT,
    CONTRACT,
    Inputs,
    kept_units,
)
from vision_ttt.ops.normed_swiglu_mlp.definition import (
    normed_swiglu_mlp_composition,
    normed_swiglu_mlp_definition,
)
from vision_ttt.ops.swiglu_mlp.op import swiglu_mlp_backward_flops, swiglu_mlp_flops

_TENSORS = "Tensor x, Tensor norm_weight, Tensor norm_bias, Tensor up, Tensor down"
_OPTIONS = "bool residual, float eps"


def _rows(inputs: Inputs) -> int:
    return inputs.x.numel() // inputs.x.shape[-1]


def _fake(inputs: Inputs, keep: bool) -> tuple[Tensor, Tensor]:
    new, rows = inputs.x.new_empty, _rows(inputs) if keep else 0
    return new(inputs.x.shape), new(rows, 2 * kept_units(inputs.down.shape[1]))


OP = Op(
    "normed_swiglu_mlp",
    Inputs,
    CONTRACT,
    normed_swiglu_mlp_definition,
    {"cpu": cpu.BACKEND},
    _fake,
    schema=f"({_TENSORS}, {_OPTIONS}, bool keep) -> (Tensor out, Tensor kept)",
    backward_schema=f"(Tensor grad, {_TENSORS}, Tensor kept, {_OPTIONS}) "
    f"-> ({_TENSORS.replace('Tensor ', 'Tensor d')})",
    backward_contract=BACKWARD_CONTRACT,
    kept=_rows,
    composition=normed_swiglu_mlp_composition,
    flops=swiglu_mlp_flops,
    backward_flops=swiglu_mlp_backward_flops,
)


@overridable
def normed_swiglu_mlp(
    x: Tensor,
    norm: tuple[Tensor, Tensor],
    up: Tensor,
    down: Tensor,
    *,
    residual: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """x + (SiLU(a) ⊙ b) W_downᵀ with [a, b] = LN(x) W_upᵀ: the second line of Vision-TTT's Eq. 9.

    It is the composition of ``layer_norm``, :func:`vision_ttt.ops.swiglu_mlp` and the sum. The
    kernel normalises the tokens of a chunk in the cache, forward and backward, so that neither the
    normed tokens nor their gradients are in memory. For the backward pass it keeps its arguments
    and three quarters of the hidden layer, or nothing of it on a processor with tile registers. It
    supports float32 on a CPU; all other calls run the composition.

    Args:
        x: [..., D].
        norm: weight and bias [D].
        up: [2 H, D], gate and value.
        down: [D, H].
        residual: add x.
        eps: added to the norm's variance.

    Returns:
        [..., D], differentiable in every tensor.

    Raises:
        TypeError: a dtype or type is not accepted.
        ValueError: the shapes do not fit each other, or the requested backend does not support the
            call.
    """
    return OP(Inputs(x, *norm, up, down, residual, eps))
