"""The SwiGLU MLP."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx.node import has_side_effect

from vision_ttt.ops import swiglu


@torch.fx.wrap
@has_side_effect  # a graph of torch.fx keeps it, though nothing uses its result
def _check_width(width: int, hidden: int) -> None:
    if width != 2 * hidden:
        raise ValueError(
            f"SwiGLU: fc1 returned {width} channels; {2 * hidden} are required, {hidden} gates"
            f" before {hidden} values. A column-wise sharded fc1 must gather its result"
            " (output_layouts=Replicate())"
        )


class SwiGLU(nn.Module):
    """W₂ (SiLU(W_g x) ⊙ W_v x), without biases; gate and value come from one matrix product.

    Args:
        dim: D.
        hidden: width of gate and value.

    Initialisation: normal with standard deviation 0.02.

    Raises:
        ValueError: in forward, ``fc1`` returns another number of channels than 2 · hidden, as a
            shard of it does.
    """

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.fc1 = nn.Linear(dim, 2 * hidden, bias=False)
        self.fc2 = nn.Linear(hidden, dim, bias=False)
        for projection in (self.fc1, self.fc2):
            nn.init.trunc_normal_(projection.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [..., D] → [..., D]."""
        x = self.fc1(x)
        _check_width(x.shape[-1], self.hidden)
        return self.fc2(swiglu(x))
