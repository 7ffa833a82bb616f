"""The definition of swiglu_mlp, in PyTorch's operations."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops.swiglu import contract as activation
from vision_ttt.ops.swiglu.definition import swiglu_definition
from vision_ttt.ops.swiglu_mlp.contract import Inputs


def swiglu_mlp_definition(inputs: Inputs) -> Tensor:
    """See :func:`vision_ttt.ops.swiglu_mlp`."""
    x, up, down = inputs
    return F.linear(swiglu_definition(activation.Inputs(F.linear(x, up))), down)
