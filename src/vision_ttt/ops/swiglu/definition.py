"""The definition of swiglu, in PyTorch's operations."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops.swiglu.contract import Inputs


def swiglu_definition(inputs: Inputs) -> Tensor:
    """See :func:`vision_ttt.ops.swiglu.swiglu`."""
    gate, value = inputs.x.chunk(2, dim=-1)
    return F.silu(gate) * value
