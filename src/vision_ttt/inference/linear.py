"""A linear layer on packed weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vision_ttt.inference.known_parts import require
from vision_ttt.ops.packed import pack, packed_linear


class PackedLinear(nn.Module):
    """x [..., in_features] → x Wᵀ + b [..., out_features], for evaluation on a CPU.

    Args:
        linear: the layer whose weight it packs; left as it is.
        dtype: float32 or bfloat16, of the packed weight.

    Raises:
        Unknown: it is no plain ``nn.Linear``.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        require(linear, "it", nn.Linear)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("weight", pack(linear.weight, dtype))
        bias = None if linear.bias is None else linear.bias.detach().float().clone()
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return packed_linear(x, self.weight, self.bias, self.out_features)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"dtype={self.weight.dtype}"
        )
