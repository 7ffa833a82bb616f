"""The SwiGLU MLP."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx.node import has_side_effect

from vision_ttt.layers.fusable import Fusable
from vision_ttt.ops import swiglu, swiglu_mlp


@torch.fx.wrap
@has_side_effect  # a graph of torch.fx keeps it, though nothing uses its result
def _check_width(width: int, hidden: int) -> None:
    if width != 2 * hidden:
        raise ValueError(
            f"SwiGLU: fc1 returned {width} channels; {2 * hidden} are required, {hidden} gates"
            f" before {hidden} values. A column-wise sharded fc1 must gather its result"
            " (output_layouts=Replicate())"
        )


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

    Raises:
        ValueError: in forward, ``fc1`` returns another number of channels than 2 · hidden, as a
            shard of it does.
    """

    fused_parts = ("fc1", "fc2")

    def __init__(self, dim: int, hidden: int, *, fused: bool = False) -> None:
        super().__init__()
        self.hidden = hidden
        self.fc1 = nn.Linear(dim, 2 * hidden, bias=False)
        self.fc2 = nn.Linear(hidden, dim, bias=False)
        for projection in (self.fc1, self.fc2):
            nn.init.trunc_normal_(projection.weight, std=0.02)
        if fused:
            self.fuse()

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [..., D] → [..., D]."""
        if self.fused:
            return swiglu_mlp(x, self.fc1.weight, self.fc2.weight)
        x = self.fc1(x)
        _check_width(x.shape[-1], self.hidden)
        return self.fc2(swiglu(x))
