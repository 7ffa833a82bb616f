"""Linear layers that use this package's matrix products in training."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_ttt.acceleration.supported_parts import are_plain
from vision_ttt.ops import linear

FEWEST_ROWS = 128
"""The smallest number of rows for which packing the weight at each call saves time."""


class CompositeLinear(nn.Linear):
    """``nn.Linear`` by :func:`vision_ttt.ops.linear`: [..., in_features] → [..., out_features].

    Calls of few rows, such as decoding's, calls in evaluation mode, and frozen layers whose input
    requires a gradient run PyTorch's function. The layer can be hooked, wrapped or replaced as any
    ``nn.Linear``.
    """

    plain = nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        return _linear(x, self.weight, self.bias) if self.training else super().forward(x)


@torch.fx.wrap
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # The op always computes the weight's gradient; PyTorch leaves it out for a frozen weight.
    frozen = x.requires_grad and not weight.requires_grad
    enough = 0 < FEWEST_ROWS * weight.shape[1] <= x.numel()
    if enough and not frozen and are_plain(x, weight, bias):
        return linear(x, weight, bias)
    return F.linear(x, weight, bias)


LINEAR = (nn.Linear, CompositeLinear)
"""The classes of a linear layer before and after :func:`vision_ttt.for_training`."""
