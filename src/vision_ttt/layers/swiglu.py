"""The SwiGLU MLP."""

from __future__ import annotations

from torch import Tensor, nn

from vision_ttt.ops import swiglu


class SwiGLU(nn.Module):
    """W₂ (SiLU(W_g x) ⊙ W_v x), without biases; gate and value come from one matrix product.

    Args:
        dim: D.
        hidden: width of gate and value.

    Initialisation: normal with standard deviation 0.02.
    """

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, 2 * hidden, bias=False)
        self.fc2 = nn.Linear(hidden, dim, bias=False)
        for projection in (self.fc1, self.fc2):
            nn.init.trunc_normal_(projection.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [..., D] → [..., D]."""
        return self.fc2(swiglu(self.fc1(x)))
