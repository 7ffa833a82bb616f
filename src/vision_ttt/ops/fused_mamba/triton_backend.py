"""fused_mamba on a GPU: the Triton kernels of its parts, and PyTorch's matrix products."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops import _triton
from vision_ttt.ops._op import Backend
from vision_ttt.ops.directional_conv1d import triton_backend as convolution
from vision_ttt.ops.fused_mamba.recomputing import Parts, recomputing
from vision_ttt.ops.linear import contract as product
from vision_ttt.ops.selective_scan import triton_backend as recurrence


def _multiply(inputs: product.Inputs) -> Tensor:
    x, weight, _ = inputs
    return F.linear(x, weight.to(x.dtype))


def _multiply_backward(inputs: product.Inputs, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, _ = inputs
    dweight = grad.flatten(0, -2).t() @ x.flatten(0, -2)
    return grad @ weight.to(grad.dtype), dweight.to(weight.dtype), grad.new_empty(0)


BACKEND = recomputing(
    Parts(
        convolution.BACKEND,
        recurrence.BACKEND,
        Backend(_multiply, _multiply_backward, lambda inputs: None),
        F.silu,
        lambda x, grad: torch.ops.aten.silu_backward(grad, x),
    ),
    lambda inputs: recurrence.no_room(inputs.A) or _triton.refusal(*inputs),
)
