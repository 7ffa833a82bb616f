"""MLPs with a GELU: per token, and with a convolution across tokens."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from vision_ttt.layers.residual_conv2d import ResidualConv2d


class Mlp(nn.Module):
    """fc₂ GELU(fc₁ x), with biases.

    Args:
        dim: D.
        hidden: width between the projections.

    Initialisation: weights normal with standard deviation 0.02, biases zero.
    """

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)
        for projection in (self.fc1, self.fc2):
            nn.init.trunc_normal_(projection.weight, std=0.02)
            nn.init.zeros_(projection.bias)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Tokens [B, T, D] → [B, T, D]; the grid, which other MLPs need, is ignored."""
        return self.fc2(F.gelu(self.fc1(x)))


class ConvMlp(Mlp):
    """fc₂ GELU(h + DWConv3×3(h)) with h = GELU(fc₁ x): H-ViT³'s MLP, which mixes neighbours.

    Arguments are those of :class:`Mlp`.
    """

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__(dim, hidden)
        self.conv = ResidualConv2d(hidden)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Tokens [B, T, D] of a grid (h, w) → [B, T, D]."""
        return self.fc2(F.gelu(self.conv(F.gelu(self.fc1(x)), grid)))
