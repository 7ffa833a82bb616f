"""The definition of swiglu_ttt, in PyTorch's operations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops.swiglu_ttt.contract import Inputs


def swiglu_ttt_definition(inputs: Inputs) -> Tensor:
    """See :func:`vision_ttt.ops.swiglu_ttt.swiglu_ttt`."""
    dtype = inputs.q.dtype
    wide = torch.promote_types(dtype, torch.float32)
    q, k, v = (x.to(wide).transpose(1, 2) for x in inputs[:3])  # [B, H, T, d]
    w1, w2, w3 = (x.to(wide) for x in inputs[3:])
    scale = inputs.loss_scale()
    z1, z2 = k @ w1, k @ w2
    gate = z1.sigmoid()
    dhidden = v @ w3.mT
    dz1 = dhidden * z2 * gate * (1 + z1 * (1 - gate))
    dz2 = dhidden * z1 * gate
    w1, w2 = w1 + scale * (k.mT @ dz1), w2 + scale * (k.mT @ dz2)
    w3 = w3 + scale * ((z1 * gate * z2).mT @ v)
    return ((F.silu(q @ w1) * (q @ w2)) @ w3).transpose(1, 2).to(dtype)
