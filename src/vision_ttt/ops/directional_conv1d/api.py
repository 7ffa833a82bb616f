"""The public op: what it computes, and the way to the kernels."""

from __future__ import annotations

from torch import Tensor

from vision_ttt.ops._native import kernels_serve
from vision_ttt.ops._overriding import overridable
from vision_ttt.ops._triton import triton_serves
from vision_ttt.ops.directional_conv1d.contract import CONTRACT
from vision_ttt.ops.directional_conv1d.cpu import directional_conv1d_op, fits
from vision_ttt.ops.directional_conv1d.reference import directional_conv1d_reference


@overridable
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
        TypeError: a dtype or type is not accepted.
        ValueError: weight, bias or reverse_channels do not fit x's C channels.
    """
    arguments = x, weight, bias, reverse_channels
    CONTRACT.check(dict(zip(CONTRACT.names, arguments, strict=True)))
    on_cpu = kernels_serve(x, weight, bias) and fits(x, reverse_channels)
    if on_cpu or triton_serves(x, weight, bias):
        return directional_conv1d_op(*arguments)
    return directional_conv1d_reference(*arguments)
