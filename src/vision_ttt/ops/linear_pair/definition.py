"""The definition of linear_pair: PyTorch's own function, twice."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops.linear_pair.contract import Inputs


def linear_pair_definition(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """See :func:`vision_ttt.ops.linear_pair`."""
    x, wide, narrow, narrow_bias = inputs
    return F.linear(x, wide), F.linear(x, narrow, narrow_bias)
