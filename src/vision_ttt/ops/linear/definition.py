"""The definition of linear: PyTorch's own function."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops.linear.contract import Inputs


def linear_definition(inputs: Inputs) -> Tensor:
    """See :func:`vision_ttt.ops.linear.linear`."""
    return F.linear(*inputs)
