"""The blocks of DiT³: those of ViT³, conditioned through adaptive LayerNorm."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from vision_ttt.layers.mlp import Mlp
from vision_ttt.layers.residual_conv2d import ResidualConv2d
from vision_ttt.layers.vit3_ttt import ViT3TTT


class TanhMlp(Mlp):
    """As :class:`vision_ttt.layers.Mlp`, with the tanh approximation of GELU."""

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Tokens [B, T, D] → [B, T, D]; the grid, which other MLPs need, is ignored."""
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class AdaptiveNorm(nn.Module):
    """LN(x) ⊙ (1 + scale) + shift with scale and shift as arguments (adaLN).

    Args:
        dim: D.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)

    def forward(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        """Tokens [B, T, D], shift and scale [B, D] → [B, T, D]."""
        return self.norm(x) * (1 + scale[:, None]) + shift[:, None]


class DiT3Block(nn.Module):
    """One block of DiT³ on tokens x [B, T, D] of a grid (h, w), given a condition c [B, D]::

        x ← x + DWConv3×3(x)                                 conditional position encoding
        s₁, a₁, g₁, s₂, a₂, g₂ = Linear(SiLU(c))             each [B, D]
        x ← x + g₁ ⊙ TTT(LN(x) ⊙ (1 + a₁) + s₁)
        x ← x + g₂ ⊙ MLP(LN(x) ⊙ (1 + a₂) + s₂)

    DiT's block with adaLN-Zero (Peebles and Xie, Fig. 3), its attention replaced by
    :class:`vision_ttt.layers.ViT3TTT`.

    Args:
        dim: D.
        num_heads: H of :class:`vision_ttt.layers.ViT3TTT`.
        mlp_ratio: hidden width of the MLP over D.

    Initialisation: the modulation's projection is zero, hence both gates are zero.
    """

    def __init__(self, dim: int, num_heads: int, *, mlp_ratio: float = 4.0) -> None:
        super().__init__()
        self.cpe = ResidualConv2d(dim)
        self.norm1 = AdaptiveNorm(dim)
        self.ttt = ViT3TTT(dim, num_heads)
        self.norm2 = AdaptiveNorm(dim)
        self.mlp = TanhMlp(dim, round(mlp_ratio * dim))
        self.modulation = modulation(dim, 6)

    def forward(self, x: Tensor, c: Tensor, grid: tuple[int, int]) -> Tensor:
        """Run the block.

        Raises:
            ValueError: T is not h · w.
        """
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c).chunk(6, dim=-1)
        x = self.cpe(x, grid)
        x = x + gate1[:, None] * self.ttt(self.norm1(x, shift1, scale1), grid)
        return x + gate2[:, None] * self.mlp(self.norm2(x, shift2, scale2), grid)


class DiT3Head(nn.Module):
    """Linear(LN(x) ⊙ (1 + a) + s) with s, a = Linear(SiLU(c)): tokens [B, T, D] → [B, T, out].

    Args:
        dim: D.
        out: channels per token.

    Initialisation: both projections are zero.
    """

    def __init__(self, dim: int, out: int) -> None:
        super().__init__()
        self.norm = AdaptiveNorm(dim)
        self.linear = nn.Linear(dim, out)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.modulation = modulation(dim, 2)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = self.modulation(c).chunk(2, dim=-1)
        return self.linear(self.norm(x, shift, scale))


def modulation(dim: int, parts: int) -> nn.Sequential:
    """Linear(SiLU(c)): [B, dim] → [B, parts · dim], initialised to zero."""
    projection = nn.Linear(dim, parts * dim)
    nn.init.zeros_(projection.weight)
    nn.init.zeros_(projection.bias)
    return nn.Sequential(nn.SiLU(), projection)
