"""The public function of fused_mamba and its registration."""

from __future__ import annotations

import torch
from torch import Tensor

from vision_ttt.ops._op import Op
from vision_ttt.ops._torch_function import overridable
from vision_ttt.ops.fused_mamba import cpu, triton_backend
from vision_ttt.ops.fused_mamba.contract import BACKWARD_CONTRACT, CONTRACT, Inputs
from vision_ttt.ops.fused_mamba.definition import fused_mamba_composition, fused_mamba_definition
from vision_ttt.ops.selective_scan.contract import num_chunks

_TENSORS = ", ".join(f"Tensor {name}" for name in CONTRACT.tensors)


def _kept(x: Inputs) -> int:
    return num_chunks(x.projected.shape[1])


def _fake(x: Inputs, keep: bool) -> tuple[Tensor, Tensor]:
    batch, length, _ = x.projected.shape
    new, kept = x.projected.new_empty, _kept(x) if keep else 0
    dtype = torch.promote_types(x.projected.dtype, torch.float32)
    return new(batch, length, x.inner()), new(kept, batch, *x.A.shape, dtype=dtype)


def _flops(shapes: Inputs) -> int:
    """FLOPs of the convolution, of the small projections and of selective_scan, per direction."""
    batch, length, _ = shapes.projected
    _, columns, inner = shapes.x_proj
    products = columns * inner + inner * shapes.dt_proj[-1] + inner * shapes.conv_weight[-1]
    return 2 * batch * length * (2 * products + 7 * inner * shapes.A[-1])


OP = Op(
    "fused_mamba",
    Inputs,
    CONTRACT,
    fused_mamba_definition,
    {"cpu": cpu.BACKEND, "triton": triton_backend.BACKEND},
    _fake,
    schema=f"({_TENSORS}, bool keep) -> (Tensor out, Tensor kept_states)",
    backward_schema=f"(Tensor grad, {_TENSORS}, Tensor kept_states) "
    f"-> ({_TENSORS.replace('Tensor ', 'Tensor d')})",
    backward_contract=BACKWARD_CONTRACT,
    kept=_kept,
    composition=fused_mamba_composition,
    flops=_flops,
    backward_flops=lambda shapes: 3 * _flops(shapes),  # what is computed again, and the gradients
)


@overridable
def fused_mamba(
    projected: Tensor,
    conv: tuple[Tensor, Tensor],
    x_proj: Tensor,
    dt: tuple[Tensor, Tensor],
    A: Tensor,
    D: Tensor,
) -> Tensor:
    """All of a bidirectional Mamba layer between its wide projections (Vim, Algorithm 1).

    It is the composition, in this order, of ``directional_conv1d`` on both directions' copies of x,
    SiLU, the projections to r, B, C and δ, :func:`vision_ttt.ops.selective_scan` with softplus, the
    mean of both directions and the gate SiLU(z). It keeps only its arguments and a state per 64
    tokens for the backward pass, which computes the rest again. It supports float32 on a CPU, and
    on a GPU what its parts support; all other calls run the composition.

    Args:
        projected: [B, T, 2 E], the columns of x and of z side by side.
        conv: weight [2 E, 1, K] and bias [2 E] of the Conv1d, the forward direction first.
        x_proj: [2, R + 2 N, E], the rows of r, B and C for each direction.
        dt: weight [2, E, R] and bias [2 E] of δ.
        A: [2 E, N].
        D: [2 E].

    Returns:
        [B, T, E], differentiable in every tensor.

    Raises:
        TypeError: a dtype or type is not accepted.
        ValueError: the tensors do not fit one layer.
    """
    return OP(Inputs(projected, *conv, x_proj, *dt, A, D))
