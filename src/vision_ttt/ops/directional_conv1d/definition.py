"""The definition of directional_conv1d, in PyTorch's operations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops.directional_conv1d.contract import Inputs


def directional_conv1d_definition(inputs: Inputs) -> Tensor:
    """See :func:`vision_ttt.ops.directional_conv1d.directional_conv1d`."""
    x, weight, bias, reverse_channels = inputs
    weight, bias = weight.to(x.dtype), bias.to(x.dtype)
    past = weight.shape[-1] - 1
    forward_channels = x.shape[-1] - reverse_channels
    x = x.transpose(1, 2)  # [B, C, T]
    parts = []
    if forward_channels:
        taps, offset = weight[:forward_channels], bias[:forward_channels]
        padded = F.pad(x[:, :forward_channels], (past, 0))
        parts.append(F.conv1d(padded, taps, offset, groups=forward_channels))
    if reverse_channels:
        mirrored, offset = weight[forward_channels:].flip(-1), bias[forward_channels:]
        padded = F.pad(x[:, forward_channels:], (0, past))
        parts.append(F.conv1d(padded, mirrored, offset, groups=reverse_channels))
    return torch.cat([part.transpose(1, 2) for part in parts], dim=-1)
