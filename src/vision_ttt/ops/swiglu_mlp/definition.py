"""The definition of swiglu_mlp, in PyTorch's operations."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops.swiglu import contract as activation
from vision_ttt.ops.swiglu.definition import swiglu_definition
from vision_ttt.ops.swiglu_mlp.contract import Inputs


def swiglu_mlp_definition(inputs: Inputs) -> Tensor:
    """See :func:`vision_ttt.ops.swiglu_mlp`."""
    x, up, down, weight, bias, residual, eps = inputs
    normed = x if weight is None else layer_norm(x, weight, bias, eps)
    branch = F.linear(swiglu_definition(activation.Inputs(F.linear(normed, up))), down)
    return x + branch if residual else branch


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LN(x) in x's dtype, with parameters of any."""
    return F.layer_norm(x, x.shape[-1:], weight.to(x.dtype), bias.to(x.dtype), eps)
