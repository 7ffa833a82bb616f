"""The definition of depthwise_correlation, in PyTorch's operations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops.vit3_ttt.contract import Inputs


def depthwise_correlation_definition(inputs: Inputs) -> Tensor:
    """See :func:`vision_ttt.ops.vit3_ttt.depthwise_correlation`."""
    x, y, height, width, kernel_size = inputs
    reach = kernel_size // 2
    grid = height, width
    image = F.pad(x.unflatten(1, grid), (0, 0, reach, reach, reach, reach))  # [B, h + …, w + …, C]
    other = y.unflatten(1, grid)
    taps = [
        (image[:, i : i + height, j : j + width] * other).sum((0, 1, 2))
        for i in range(kernel_size)
        for j in range(kernel_size)
    ]
    return torch.stack(taps, dim=1).view(x.shape[-1], 1, kernel_size, kernel_size).to(x.dtype)
