"""The public op: what it computes, and the way to the kernels."""

from __future__ import annotations

from torch import Tensor

from vision_ttt.ops._native import kernels_serve
from vision_ttt.ops._overriding import overridable
from vision_ttt.ops._triton import triton_serves
from vision_ttt.ops.gated_norm import cpu, triton_backend
from vision_ttt.ops.gated_norm.contract import CONTRACT
from vision_ttt.ops.gated_norm.reference import gated_norm_reference


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
        ValueError: z, gate and bias do not fit the weight.
    """
    arguments = z, gate, weight, bias, eps
    CONTRACT.check(dict(zip(CONTRACT.names, arguments, strict=True)))
    tensors = (z, weight, bias) if gate is None else (z, weight, bias, gate)
    if (kernels_serve(*tensors) and cpu.fits(weight)) or (
        triton_serves(*tensors) and triton_backend.fits(z, weight)
    ):
        return cpu.gated_norm_op(*arguments)
    return gated_norm_reference(*arguments)
