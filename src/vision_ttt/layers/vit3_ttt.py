"""ViT³'s token mixer: two inner models, trained on the image's tokens and applied to them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vision_ttt.layers.grid import check_grid
from vision_ttt.layers.rotary2d import rotate
from vision_ttt.ops.vit3_ttt import depthwise, depthwise_step, gated_unit, gated_unit_step

for _name in ("check_grid", "depthwise", "depthwise_step", "gated_unit", "gated_unit_step"):
    torch.fx.wrap(_name)


class ViT3TTT(nn.Module):
    """Mix image tokens [B, T, D] on a grid (h, w) by test-time training: → [B, T, D].

    ViT³, Sec. 3 of the supplement: H heads learn a gated linear unit each, and one more head, as
    wide as they are (d = D / H), learns a depth-wise 3×3 convolution. Each takes one gradient step
    on the dot product loss over all tokens::

        q₁, k₁, v₁ [B, T, D], q₂, k₂, v₂ [B, T, d] = Linear(x)
        W₁', W₂' = one step on f(k₁) → v₁,    o₁ = q₁ W₁' ⊙ SiLU(q₁ W₂')   per head
        W₃'      = one step on W₃ * k₂ → v₂,  o₂ = W₃' * q₂
        out      = Linear([o₁, o₂])

    The inner gradients are in closed form, see :mod:`vision_ttt.ops.vit3_ttt`: the forward pass
    needs no autograd, and is differentiable. Each output depends on all tokens; cost is linear.

    Args:
        dim: D.
        num_heads: H.
        qkv_bias: whether the projection to queries, keys and values has a bias.

    Initialisation: normal with standard deviation 0.02, biases zero.

    Raises:
        ValueError: dim is not a multiple of num_heads.
    """

    def __init__(self, dim: int, num_heads: int, *, qkv_bias: bool = True) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise ValueError(f"dim must be a multiple of num_heads, got {dim} and {num_heads}")
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.qkv = nn.Linear(dim, 3 * (dim + self.head_dim), bias=qkv_bias)
        self.w1 = nn.Parameter(torch.empty(num_heads, self.head_dim, self.head_dim))
        self.w2 = nn.Parameter(torch.empty(num_heads, self.head_dim, self.head_dim))
        self.w3 = nn.Parameter(torch.empty(self.head_dim, 1, 3, 3))
        self.proj = nn.Linear(dim + self.head_dim, dim)
        for weight in (self.qkv.weight, self.w1, self.w2, self.w3, self.proj.weight):
            nn.init.trunc_normal_(weight, std=0.02)
        for bias in (self.qkv.bias, self.proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def no_weight_decay(self) -> set[str]:
        """The initial states of the inner models."""
        return {"w1", "w2", "w3"}

    def forward(self, x: Tensor, grid: tuple[int, int], rotations: Tensor | None = None) -> Tensor:
        """Mix.

        Args:
            x: [B, T, D], the grid's tokens row by row.
            grid: (h, w) with T = h · w.
            rotations: [T, D / 2, 2] of :func:`vision_ttt.layers.rotary2d.rotary_table`, applied to
                q₁ and k₁.

        Raises:
            ValueError: T is not h · w.
        """
        check_grid(x.shape[1], grid)
        (q1, k1, v1), (q2, k2, v2) = self.views(x, rotations)
        w1, w2 = gated_unit_step(k1, v1, self.w1, self.w2)
        w3 = depthwise_step(k2, v2, self.w3, grid)
        o2 = depthwise(q2, w3, grid)  # [B, T, d]
        o1 = gated_unit(q1, w1, w2).flatten(2)  # [B, T, D]
        return self.proj(torch.cat((o1, o2), dim=-1))

    def views(
        self, x: Tensor, rotations: Tensor | None = None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Queries, keys and values: three [B, T, H, d] for the gated units, three [B, T, d]."""
        dim, head_dim = self.num_heads * self.head_dim, self.head_dim
        widths = (dim, dim, dim, head_dim, head_dim, head_dim)
        q, k, v, q2, k2, v2 = self.qkv(x).split(widths, dim=-1)
        if rotations is not None:
            q, k = rotate(q, rotations), rotate(k, rotations)
        heads = (self.num_heads, head_dim)
        return tuple(part.unflatten(-1, heads) for part in (q, k, v)), (q2, k2, v2)
