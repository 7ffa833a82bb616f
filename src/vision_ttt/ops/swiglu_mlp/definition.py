"""The definition of swiglu_mlp, in PyTorch's operations."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops.swiglu.reference import swiglu_reference


def swiglu_mlp_definition(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """See :func:`vision_ttt.ops.swiglu_mlp`."""
    return F.linear(swiglu_reference(F.linear(x, up)), down)
