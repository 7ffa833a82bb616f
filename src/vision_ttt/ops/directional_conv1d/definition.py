"""The definition of directional_conv1d, in PyTorch's operations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops.directional_conv1d.contract import Inputs


def directional_conv1d_definition(inputs: Inputs) -> Tensor:
    """See :func:`vision_ttt.ops.directional_conv1d.directional_conv1d`."""
    x, weight, bias, reverse_channels = inputs
    past = weight.shape[-1] - 1
    forward = x.shape[-1] - reverse_channels
    x = x.transpose(1, 2)  # [B, C, T]
    parts = []
    if forward:
        taps, offset = weight[:forward], bias[:forward]
        parts.append(_convolve(x[:, :forward], taps, offset, (past, 0)))
    if reverse_channels:
        taps, offset = weight[forward:].flip(-1), bias[forward:]
        parts.append(_convolve(x[:, forward:], taps, offset, (0, past)))
    return torch.cat([part.transpose(1, 2) for part in parts], dim=-1)


def _convolve(x: Tensor, weight: Tensor, bias: Tensor, padding: tuple[int, int]) -> Tensor:
    # The casts follow the slices: PyTorch 2.11 does not compile a slice of a cast weight on a CPU.
    weight, bias = weight.to(x.dtype), bias.to(x.dtype)
    return F.conv1d(F.pad(x, padding), weight, bias, groups=len(weight))
