"""The definition of swiglu, in PyTorch's operations."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def swiglu_reference(x: Tensor) -> Tensor:
    """See :func:`vision_ttt.ops.swiglu.swiglu`."""
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value
