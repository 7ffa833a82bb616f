"""Convolutions whose BatchNorm is part of their weights."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import fuse_conv_bn_eval

from vision_ttt.acceleration.supported_parts import UnsupportedPart, require
from vision_ttt.layers.conv_stem import ConvNorm


class FoldedConvNorm(nn.Module):
    """Maps [B, C, h, w] → ReLU of a convolution, for evaluation on a CPU.

    Products are in the dtype of the weight, the result is in that of the maps.

    Args:
        conv: its convolution and BatchNorm become one convolution; it is not changed.
        dtype: float32 or bfloat16, of the folded weight.

    Raises:
        UnsupportedPart: a part is not PyTorch's own, or has a hook.
    """

    def __init__(self, conv: ConvNorm, dtype: torch.dtype) -> None:
        super().__init__()
        require(conv, "it", ConvNorm)
        require(conv.conv, "conv", nn.Conv2d)
        require(conv.norm, "norm", nn.BatchNorm2d)
        if conv.norm.running_mean is None:
            raise UnsupportedPart("norm keeps no statistics")
        folded = fuse_conv_bn_eval(
            *(copy.deepcopy(part).float() for part in (conv.conv, conv.norm))
        )
        self.conv = folded.to(dtype, memory_format=torch.channels_last).requires_grad_(False)
        self.relu = conv.relu

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv(x.to(self.conv.weight.dtype)).to(x.dtype)
        return F.relu_(out) if self.relu else out
