"""The definition of depthwise_conv2d, in PyTorch's operations."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops.depthwise_conv2d.contract import Inputs


def depthwise_conv2d_definition(inputs: Inputs) -> Tensor:
    """See :func:`vision_ttt.ops.depthwise_conv2d.depthwise_conv2d`."""
    x, weight, height, width = inputs
    weight = weight.to(x.dtype)
    if not x.shape[-1]:  # PyTorch's convolution needs a channel
        return x * weight.sum((1, 2, 3))
    # Tokens are the channels-last memory format already: no copy on the way in or out.
    image = x.unflatten(1, (height, width)).permute(0, 3, 1, 2)  # [B, C, h, w]
    image = F.conv2d(image, weight, padding=weight.shape[-1] // 2, groups=x.shape[-1])
    return image.permute(0, 2, 3, 1).flatten(1, 2)  # [B, T, C]
