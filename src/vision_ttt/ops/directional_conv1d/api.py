"""The public op: what it computes, its definition in PyTorch, and the way to the kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops._native import kernels_serve
from vision_ttt.ops._triton import triton_serves
from vision_ttt.ops.directional_conv1d.cpu import directional_conv1d_op, fits


def directional_conv1d(x: Tensor, weight: Tensor, bias: Tensor, reverse_channels: int) -> Tensor:
    """Convolve each channel with taps of its own, looking back in its scan direction only.

    With K taps, y_t = bias + Σ_j weight_j x_{t-(K-1)+j}; the last ``reverse_channels`` channels
    scan from T to 1 and take x_{t+(K-1)-j} instead. Beyond the ends x is zero.

    Args:
        x: [B, T, C], any strides; the kernels want a contiguous last axis.
        weight: [C, 1, K], as of a depth-wise ``nn.Conv1d``.
        bias: [C].
        reverse_channels: how many of the last channels look the other way.

    Returns:
        [B, T, C], contiguous, differentiable in x, weight and bias.

    Raises:
        ValueError: weight, bias or reverse_channels do not fit x's C channels.
    """
    channels = x.shape[-1]
    if weight.shape[:2] != (channels, 1) or bias.shape != (channels,):
        raise ValueError(
            f"x {list(x.shape)} wants weight [{channels}, 1, K] and bias [{channels}], "
            f"got {list(weight.shape)} and {list(bias.shape)}"
        )
    if not 0 <= reverse_channels <= channels:
        raise ValueError(f"reverse_channels must be 0 to {channels}, got {reverse_channels}")
    on_cpu = kernels_serve(x, weight, bias) and fits(x, reverse_channels)
    if on_cpu or triton_serves(x, weight, bias):
        return directional_conv1d_op(x, weight, bias, reverse_channels)
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
