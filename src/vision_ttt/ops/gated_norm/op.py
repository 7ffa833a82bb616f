"""The public function of gated_norm and its registration."""

from __future__ import annotations

from torch import Tensor

from vision_ttt.ops._op import Op
from vision_ttt.ops._torch_function import overridable
from vision_ttt.ops.gated_norm import cpu, triton_backend
from vision_ttt.ops.gated_norm.contract import BACKWARD_CONTRACT, CONTRACT, Inputs
from vision_ttt.ops.gated_norm.definition import gated_norm_definition


def _fake(inputs: Inputs) -> Tensor:
    return inputs.z.new_empty(*inputs.z.shape[:2], inputs.weight.shape[1])


OP = Op(
    "gated_norm",
    Inputs,
    CONTRACT,
    gated_norm_definition,
    {"cpu": cpu.BACKEND, "triton": triton_backend.BACKEND},
    _fake,
    schema="(Tensor z, Tensor? gate, Tensor weight, Tensor bias, float eps) -> Tensor",
    backward_schema="(Tensor grad, Tensor z, Tensor? gate, Tensor weight, Tensor bias, float eps) "
    "-> (Tensor dz, Tensor dgate, Tensor dweight, Tensor dbias)",
    backward_contract=BACKWARD_CONTRACT,
)


@overridable
def gated_norm(
    z: Tensor, gate: Tensor | None, weight: Tensor, bias: Tensor, eps: float = 1e-6
) -> Tensor:
    """Merge scan directions (Vision-TTT, Eq. 12): GELU(gate) ⊙ Σ_r LN_r(z_r).

    Args:
        z: the R directions' outputs side by side [B, T, R · D].
        gate: logits [B, T, D], or None for no gate.
        weight, bias: of the R norms [R, D].
        eps: added to the norms' variances.

    Returns:
        [B, T, D], differentiable in every tensor argument.

    Raises:
        TypeError: a dtype or type is not accepted.
        ValueError: z, gate and bias do not fit the weight, or the requested backend does not
            support the call.
    """
    return OP(Inputs(z, gate, weight, bias, eps))
