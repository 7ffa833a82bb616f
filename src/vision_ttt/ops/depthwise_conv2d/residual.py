"""The depth-wise convolution with its residual."""

from __future__ import annotations

import torch
from torch import Tensor

from vision_ttt.ops._backend import autocast_kind
from vision_ttt.ops._torch_function import overridable
from vision_ttt.ops.depthwise_conv2d.op import depthwise_conv2d


@overridable
def residual_depthwise_conv2d(x: Tensor, weight: Tensor, grid: tuple[int, int]) -> Tensor:
    """x + :func:`depthwise_conv2d` of x, in one pass over memory where float32 permits it.

    The residual is a convolution too, with the tap 1 at the centre, so that the sum of both is one
    convolution by the sum of their kernels. In float32 that rounds like the sum of the results. In
    shorter formats the 1 would hide most digits of the weight: there the results are added.

    Args:
        x, weight, grid: as of :func:`depthwise_conv2d`.

    Returns:
        [B, T, C], differentiable in x and weight.

    Raises:
        TypeError, ValueError: as :func:`depthwise_conv2d`.
    """
    casts = torch.is_autocast_enabled(autocast_kind(x))
    if casts or not x.dtype == weight.dtype == torch.float32 or weight.ndim != 4:
        return x + depthwise_conv2d(x, weight, grid)
    identity = torch.zeros_like(weight[:1])
    identity[..., weight.shape[-2] // 2, weight.shape[-1] // 2] = 1.0
    return depthwise_conv2d(x, weight + identity, grid)
