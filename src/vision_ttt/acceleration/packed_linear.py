"""Linear layers and patch embeddings on packed weights, and convolutions with their BatchNorm."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import fuse_conv_bn_eval

from vision_ttt.acceleration.supported_parts import UnsupportedPart, require
from vision_ttt.layers.conv_stem import ConvNorm
from vision_ttt.ops._backend import is_transformed
from vision_ttt.ops.packed import pack, packed_linear, packed_patches, unpack


class PackedLinear(nn.Module):
    """x [..., in_features] → x Wᵀ + b [..., out_features], for evaluation on a CPU.

    Args:
        linear: the layer whose weight is packed; it is not changed.
        dtype: float32 or bfloat16, of the packed weight.

    Raises:
        UnsupportedPart: it is no plain ``nn.Linear``, or its weight is empty or not of floating
            point.
    """

    packed: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        require(linear, "it", nn.Linear)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        _hold_packed(self, linear, dtype)

    @property
    def weight(self) -> Tensor:
        """The weight [out_features, in_features], unpacked at each call."""
        return unpack(self.packed, self.out_features, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        return packed_linear(x, self.packed, self.bias, self.out_features)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"dtype={self.packed.dtype}"
        )


class PackedPatches(nn.Module):
    """Images [B, C, H, W] → [B, out_channels, h, w]: non-overlapping patches by one product.

    For evaluation on a CPU. The result is in the channels-last memory format. With patches of one
    pixel, it is in the memory format of the images.

    Args:
        conv: the convolution whose weight is packed; its stride is its kernel size.
        dtype: float32 or bfloat16, of the packed weight.

    Raises:
        UnsupportedPart: it is not a plain ``nn.Conv2d`` of that kind, or its weight is empty or not
            of floating point.
    """

    packed: Tensor
    bias: Tensor | None

    def __init__(self, conv: nn.Conv2d, dtype: torch.dtype) -> None:
        super().__init__()
        require(conv, "it", nn.Conv2d)
        if conv.stride != conv.kernel_size or conv.groups != 1 or conv.dilation != (1, 1):
            raise UnsupportedPart("its patches overlap")
        if conv.padding not in ((0, 0), "valid"):
            raise UnsupportedPart("it pads")
        self.kernel_size, self.stride = conv.kernel_size, conv.stride
        self.in_channels, self.out_channels = conv.in_channels, conv.out_channels
        _hold_packed(self, conv, dtype)

    @property
    def weight(self) -> Tensor:
        """The convolution's weight, unpacked at each call."""
        patch = (self.in_channels, *self.kernel_size)
        return unpack(self.packed, self.out_channels, math.prod(patch)).unflatten(1, patch)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim not in (3, 4) or x.shape[-3] != self.in_channels:
            raise ValueError(
                f"images must be [B, {self.in_channels}, H, W] or [{self.in_channels}, H, W], got "
                f"{list(x.shape)}"
            )
        images = x if x.ndim == 4 else x.unsqueeze(0)
        out = packed_patches(images, self.packed, self.bias, self.out_channels, self.kernel_size)
        out = out.permute(0, 3, 1, 2)
        if self.kernel_size == (1, 1) and not _is_channels_last(images):
            out = out.contiguous()  # as a convolution's result, which callers take views of
        return out if x.ndim == 4 else out.squeeze(0)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"dtype={self.packed.dtype}"
        )


class FoldedConvNorm(nn.Module):
    """Applies a convolution, and a ReLU if ``conv`` has one, to maps [B, C, h, w], on a CPU.

    Products are in the dtype of the weight. The result is in the dtype of the maps.

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


def _is_channels_last(images: Tensor) -> bool:
    if is_transformed():  # vmap does not support memory formats
        return False
    return images.is_contiguous(memory_format=torch.channels_last)


def _hold_packed(holder: nn.Module, layer: nn.Linear | nn.Conv2d, dtype: torch.dtype) -> None:
    """Register a layer's packed weight and its bias as buffers.

    Raises:
        UnsupportedPart: its weight is empty or not of floating point.
    """
    weight, bias = layer.weight, layer.bias
    if not weight.numel() or not weight.is_floating_point():
        raise UnsupportedPart(f"its weight is {list(weight.shape)} in {weight.dtype}")
    holder.register_buffer("packed", pack(weight.flatten(1), dtype))
    holder.register_buffer("bias", None if bias is None else bias.detach().float().clone())
