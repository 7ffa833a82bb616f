"""The definition of gated_norm, in PyTorch's operations."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops.gated_norm.contract import Inputs


def gated_norm_definition(inputs: Inputs) -> Tensor:
    """See :func:`vision_ttt.ops.gated_norm.gated_norm`."""
    z, gate, weight, bias, eps = inputs
    normed = F.layer_norm(z.unflatten(-1, weight.shape), weight.shape[1:], eps=eps)  # [B, T, R, D]
    total = (normed * weight + bias).sum(-2)
    return (total if gate is None else F.gelu(gate) * total).to(z.dtype)
