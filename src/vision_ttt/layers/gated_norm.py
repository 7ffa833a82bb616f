"""The LayerNorms after each scan direction, their sum, and the gate."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_ttt.ops import gated_norm


class GatedNorm(nn.Module):
    """GELU(gate) ⊙ Σ_r LN_r(z_r): one LayerNorm per scan direction r (Vision-TTT, Eq. 12).

    Args:
        dim: D, channels of each direction.
        directions: R.
        eps: added to the variances.
    """

    def __init__(self, dim: int, directions: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(directions, dim))
        self.bias = nn.Parameter(torch.zeros(directions, dim))
        self.eps = eps

    def no_weight_decay(self) -> set[str]:
        """Both parameters: as matrices [R, D] they would decay."""
        return {"weight", "bias"}

    def forward(self, z: Tensor, gate: Tensor | None = None) -> Tensor:
        """Merge z [B, T, R · D] under the gate's logits [B, T, D] into [B, T, D]."""
        return gated_norm(z, gate, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        directions, dim = self.weight.shape
        return f"dim={dim}, directions={directions}, eps={self.eps}"


class TanhGatedNorm(GatedNorm):
    """:class:`GatedNorm` with GELU's tanh approximation, the TTT language models'."""

    def forward(self, z: Tensor, gate: Tensor | None = None) -> Tensor:
        """As :class:`GatedNorm`."""
        total = super().forward(z)
        return total if gate is None else F.gelu(gate, approximate="tanh") * total
