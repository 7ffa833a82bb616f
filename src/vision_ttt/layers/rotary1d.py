"""1-D rotary position embedding (RoPE) that begins anew with every mini-batch."""

from __future__ import annotations

import torch
from torch import Tensor

from vision_ttt.layers.computed_buffer import ComputedBuffer
from vision_ttt.layers.rotary2d import rotate
from vision_ttt.ops._contract import Whole, check_number, check_whole_numbers


class MiniBatchRotary(ComputedBuffer):
    """RoPE by a token's place n in its mini-batch, 0 ≤ n < b: [B, T, heads, d] → [B, T, heads, d].

    Each pair i of adjacent channels is rotated by the angle n · base^(-2 i / d). Places rather than
    tokens are counted, as in the released code of TTT, because in a TTT layer only tokens of the
    same mini-batch meet in a product of q and k.

    Args:
        head_dim: d.
        mini_batch_size: b.
        base: of the frequencies.

    Raises:
        ValueError: head_dim is odd.
    """

    computed = "table"
    table: Tensor

    def __init__(self, head_dim: int, mini_batch_size: int, base: float = 10_000.0) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"rotary embedding rotates pairs of channels, got head_dim={head_dim}")
        self.head_dim, self.mini_batch_size, self.base = head_dim, mini_batch_size, base
        self.init_non_persistent_buffers()

    def compute_buffer(self, device: torch.device | None) -> Tensor:
        """Cosines and sines [b, d / 2, 2], float32."""
        pairs = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device)
        places = torch.arange(self.mini_batch_size, dtype=torch.float32, device=device)
        angles = places[:, None] * self.base ** (-pairs / self.head_dim)
        return torch.stack((angles.cos(), angles.sin()), dim=-1)

    def forward(self, x: Tensor, position: int | Tensor = 0) -> Tensor:
        """Rotate x [B, T, heads, d], whose first token is at ``position``; result in x's dtype.

        Args:
            x: tokens of a sequence.
            position: the first token's place in its mini-batch, or each sequence's [B].

        Raises:
            TypeError, ValueError: the position is neither.
        """
        tokens = torch.arange(x.shape[1], device=x.device)
        if isinstance(position, Tensor):
            check_whole_numbers("MiniBatchRotary", "position", position, x)
            tokens = position.unsqueeze(-1) + tokens  # [B, T]
        else:
            check_number("MiniBatchRotary", "position", position, Whole(0))
            tokens = tokens + position  # [T]
        rotations = self.table[tokens % self.mini_batch_size].unsqueeze(-3)  # [(B,) T, 1, d / 2, 2]
        return rotate(x, rotations)

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, mini_batch_size={self.mini_batch_size}, base={self.base}"
