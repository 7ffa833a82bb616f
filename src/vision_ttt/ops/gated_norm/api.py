"""The public op: what it computes, its definition in PyTorch, and the way to the kernels."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops._native import kernels_serve
from vision_ttt.ops._triton import triton_serves
from vision_ttt.ops.gated_norm import cpu, triton_backend


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
        ValueError: z, gate and bias do not fit the weight.
    """
    parts, dim = weight.shape
    fitting = z.shape[-1] == parts * dim and bias.shape == weight.shape
    if not fitting or (gate is not None and gate.shape != (*z.shape[:-1], dim)):
        raise ValueError(
            f"weight [{parts}, {dim}] wants z [B, T, {parts * dim}], gate [B, T, {dim}] or None "
            f"and bias [{parts}, {dim}], got {list(z.shape)}, "
            f"{None if gate is None else list(gate.shape)} and {list(bias.shape)}"
        )
    tensors = (z, weight, bias) if gate is None else (z, weight, bias, gate)
    if (kernels_serve(*tensors) and cpu.fits(weight)) or (
        triton_serves(*tensors) and triton_backend.fits(z, weight)
    ):
        return cpu.gated_norm_op(z, gate, weight, bias, eps)
    z = F.layer_norm(z.unflatten(-1, (parts, dim)), (dim,), eps=eps)  # [B, T, R, D]
    total = (z * weight + bias).sum(-2)
    return total if gate is None else F.gelu(gate) * total
