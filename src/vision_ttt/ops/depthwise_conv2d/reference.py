"""The definition of depthwise_conv2d, in PyTorch's operations."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def depthwise_conv2d_reference(x: Tensor, weight: Tensor, *grid: int) -> Tensor:
    """See :func:`vision_ttt.ops.depthwise_conv2d.depthwise_conv2d`."""
    # Tokens are the channels-last memory format already: no copy on the way in or out.
    image = x.unflatten(1, grid).permute(0, 3, 1, 2)  # [B, C, h, w]
    image = F.conv2d(image, weight, padding=weight.shape[-1] // 2, groups=x.shape[-1])
    return image.permute(0, 2, 3, 1).flatten(1, 2)  # [B, T, C]
