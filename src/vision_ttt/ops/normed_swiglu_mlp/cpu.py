"""normed_swiglu_mlp on a CPU: the compiled kernels in csrc/swiglu_mlp."""

from __future__ import annotations

import torch
from torch import Tensor

from vision_ttt.ops import _native
from vision_ttt.ops._native import run_kernel
from vision_ttt.ops._op import Backend
from vision_ttt.ops.normed_swiglu_mlp.contract import Inputs
from vision_ttt.ops.swiglu_mlp import contract as mlp
from vision_ttt.ops.swiglu_mlp import cpu as mlp_cpu
from vision_ttt.ops.swiglu_mlp.cpu import Norm, describe


def refusal(inputs: Inputs) -> str | None:
    """The reason why the kernels do not support the inputs, or None if they do."""
    plain = mlp_cpu.refusal(mlp.Inputs(inputs.x, inputs.up, inputs.down))
    return plain or _native.refusal(*inputs[:5])


def _contiguous(inputs: Inputs) -> Inputs:
    return Inputs(*(tensor.contiguous() for tensor in inputs[:5]), *inputs[5:])


def _forward(inputs: Inputs) -> Tensor:
    x, weight, bias, up, down, residual, eps = _contiguous(inputs)
    out = torch.empty_like(x)
    norm = Norm(weight, bias, eps, residual)
    run_kernel("vision_ttt_swiglu_mlp", describe(mlp.Inputs(x, up, down), norm, out=out))
    return out


def _backward(inputs: Inputs, grad: Tensor) -> tuple[Tensor, ...]:
    x, weight, bias, up, down, residual, eps = _contiguous(inputs)
    dx, dweight, dbias, dup, ddown = (torch.empty_like(t) for t in (x, weight, bias, up, down))
    grad = grad.to(x.dtype).contiguous()  # lives until the kernel has run
    norm = Norm(weight, bias, eps, residual)
    gradients = dx, dup, ddown, dweight, dbias
    problem = describe(mlp.Inputs(x, up, down), norm, grad=grad, gradients=gradients)
    run_kernel("vision_ttt_swiglu_mlp_backward", problem)
    return dx, dweight, dbias, dup, ddown


BACKEND = Backend(_forward, _backward, refusal)
