"""The definition of residual_conv2d_norm, in PyTorch's operations."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops.depthwise_conv2d import contract as conv2d
from vision_ttt.ops.depthwise_conv2d import residual_depthwise_conv2d
from vision_ttt.ops.depthwise_conv2d.definition import depthwise_conv2d_definition
from vision_ttt.ops.residual_conv2d_norm.contract import Inputs


def residual_conv2d_norm_definition(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """See :func:`vision_ttt.ops.residual_conv2d_norm`."""
    x, weight = inputs.x, inputs.weight
    y = x + depthwise_conv2d_definition(conv2d.Inputs(x, weight, *inputs.grid))
    return y, _norm(y, inputs)


def residual_conv2d_norm_composition(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The same by the op depthwise_conv2d, which selects its own backend."""
    y = residual_depthwise_conv2d(inputs.x, inputs.weight, inputs.grid)
    return y, _norm(y, inputs)


def _norm(y: Tensor, inputs: Inputs) -> Tensor:
    return F.layer_norm(y, y.shape[-1:], inputs.norm_weight, inputs.norm_bias, inputs.eps)
