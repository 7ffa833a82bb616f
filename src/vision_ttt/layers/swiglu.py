"""The SwiGLU MLP."""

from __future__ import annotations

from torch import Tensor, nn

from vision_ttt.layers.fusable import Fusable
from vision_ttt.ops import swiglu, swiglu_mlp


class SwiGLU(Fusable):
    """W₂ (SiLU(W_g x) ⊙ W_v x), without biases; gate and value come from one matrix product.

    Args:
        dim: D.
        hidden: width of gate and value.
        fused: run as one op, :func:`vision_ttt.ops.swiglu_mlp`, which keeps only its input for the
            backward pass and computes the hidden layer again. ``fc1`` and ``fc2`` then only hold
            their weights, see :class:`vision_ttt.layers.fusable.Fusable`: hooks on them do not run,
            and replacing one is an error until ``fused`` is set to False.

    Initialisation: normal with standard deviation 0.02.
    """

    fused_parts = ("fc1", "fc2")

    def __init__(self, dim: int, hidden: int, *, fused: bool = False) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, 2 * hidden, bias=False)
        self.fc2 = nn.Linear(hidden, dim, bias=False)
        for projection in (self.fc1, self.fc2):
            nn.init.trunc_normal_(projection.weight, std=0.02)
        if fused:
            self.switch_on()

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [..., D] → [..., D]."""
        if self.fused:
            return swiglu_mlp(x, self.fc1.weight, self.fc2.weight)
        return self.fc2(swiglu(self.fc1(x)))
