"""Linear layers and patch embeddings on packed weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vision_ttt.inference.supported_parts import UnsupportedPart, require
from vision_ttt.layers.linear import Linear
from vision_ttt.ops.packed import pack, packed_linear, packed_patches


class PackedLinear(nn.Module):
    """x [..., in_features] → x Wᵀ + b [..., out_features], for evaluation on a CPU.

    Args:
        linear: the layer whose weight is packed; it is not changed.
        dtype: float32 or bfloat16, of the packed weight.

    Raises:
        UnsupportedPart: it is no plain ``nn.Linear`` or :class:`vision_ttt.layers.Linear`.
    """

    packed: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        require(linear, "it", nn.Linear, Linear)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("packed", pack(linear.weight, dtype))
        bias = None if linear.bias is None else linear.bias.detach().float().clone()
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return packed_linear(x, self.packed, self.bias, self.out_features)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"dtype={self.packed.dtype}"
        )


class PackedPatches(nn.Module):
    """Images [B, C, H, W] → [B, out_channels, h, w]: non-overlapping patches by one product.

    For evaluation on a CPU; the result is in the channels-last memory format.

    Args:
        conv: the convolution whose weight is packed; its stride is its kernel size.
        dtype: float32 or bfloat16, of the packed weight.

    Raises:
        UnsupportedPart: it is not a plain ``nn.Conv2d`` of that kind.
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
        self.register_buffer("packed", pack(conv.weight.flatten(1), dtype))
        bias = None if conv.bias is None else conv.bias.detach().float().clone()
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4 or x.shape[1] != self.in_channels:
            raise ValueError(f"images must be [B, {self.in_channels}, H, W], got {list(x.shape)}")
        out = packed_patches(x, self.packed, self.bias, self.out_channels, self.kernel_size)
        return out.permute(0, 3, 1, 2)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"dtype={self.packed.dtype}"
        )
