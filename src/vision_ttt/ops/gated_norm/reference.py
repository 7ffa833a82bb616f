"""The definition of gated_norm, in PyTorch's operations."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def gated_norm_reference(
    z: Tensor, gate: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    """See :func:`vision_ttt.ops.gated_norm.gated_norm`."""
    parts, dim = weight.shape
    z = F.layer_norm(z.unflatten(-1, (parts, dim)), (dim,), eps=eps)  # [B, T, R, D]
    total = (z * weight + bias).sum(-2)
    return total if gate is None else F.gelu(gate) * total
