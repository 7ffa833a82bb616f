"""Softmax attention as a token mixer of blocks that know the tokens' grid."""

from __future__ import annotations

from timm.layers import Attention
from torch import Tensor, nn


class GridAttention(Attention):
    """timm's multi-head self-attention [B, T, D] → [B, T, D] with biases, as in DeiT.

    It mixes all tokens at quadratic cost and has no use for the grid.

    Args:
        dim: D.
        num_heads: a divisor of D.

    Initialisation: weights normal with standard deviation 0.02, biases zero.

    Raises:
        ValueError: D is no multiple of the number of heads.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        if dim % num_heads:
            raise ValueError(f"dim is {dim}; it must be a multiple of num_heads, {num_heads}")
        super().__init__(dim, num_heads, qkv_bias=True)
        for projection in (self.qkv, self.proj):
            nn.init.trunc_normal_(projection.weight, std=0.02)
            nn.init.zeros_(projection.bias)

    def forward(self, x: Tensor, grid: tuple[int, int], rotations: Tensor | None = None) -> Tensor:
        """Mix tokens; grid and rotations, which other mixers need, are ignored."""
        return super().forward(x)
