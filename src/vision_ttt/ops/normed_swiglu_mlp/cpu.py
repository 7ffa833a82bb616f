"""normed_swiglu_mlp on a CPU: the compiled kernels in csrc/swiglu_mlp."""

from __future__ import annotations

import torch
from torch import Tensor

from vision_ttt.ops import _native
from vision_ttt.ops._native import run_kernel
from vision_ttt.ops._op import Backend
from vision_ttt.ops.normed_swiglu_mlp.contract import Inputs, kept_units
from vision_ttt.ops.swiglu_mlp import contract as mlp
from vision_ttt.ops.swiglu_mlp import cpu as mlp_cpu
from vision_ttt.ops.swiglu_mlp.cpu import Norm, describe


def refusal(inputs: Inputs) -> str | None:
    """The reason why the kernels do not support the inputs, or None if they do."""
    plain = mlp_cpu.refusal(mlp.Inputs(inputs.x, inputs.up, inputs.down))
    return plain or _native.refusal(*inputs[:5])


def _contiguous(inputs: Inputs) -> Inputs:
    return Inputs(*(tensor.contiguous() for tensor in inputs[:5]), *inputs[5:])


def _forward(inputs: Inputs, keep: bool) -> tuple[Tensor, Tensor]:
    x, weight, bias, up, down, residual, eps = _contiguous(inputs)
    out = torch.empty_like(x)
    kept = x.new_empty(x.numel() // x.shape[-1] if keep else 0, 2 * kept_units(down.shape[1]))
    norm = Norm(weight, bias, eps, residual)
    problem = describe(mlp.Inputs(x, up, down), norm, out=out, kept=kept if keep else None)
    run_kernel("vision_ttt_swiglu_mlp", problem)
    return out, kept


def _backward(inputs: Inputs, grad: Tensor, kept: Tensor) -> tuple[Tensor, ...]:
    x, weight, bias, up, down, residual, eps = _contiguous(inputs)
    dx, dweight, dbias, dup, ddown = (torch.empty_like(t) for t in (x, weight, bias, up, down))
    # These two live until the kernel has run.
    grad, kept = grad.to(x.dtype).contiguous(), kept.to(x.dtype).contiguous()
    norm = Norm(weight, bias, eps, residual)
    gradients = dx, dup, ddown, dweight, dbias
    problem = describe(mlp.Inputs(x, up, down), norm, grad=grad, kept=kept, gradients=gradients)
    run_kernel("vision_ttt_swiglu_mlp_backward", problem)
    return dx, dweight, dbias, dup, ddown


BACKEND = Backend(_forward, _backward, refusal)
