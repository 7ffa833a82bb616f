"""The inner learner of TTT-Linear as a module: it owns the initial state and runs the op."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vision_ttt.ops import ttt_linear


class LinearLearner(nn.Module):
    """Linear inner models, one per head, trained along the tokens with ``f(x) = x + LN(x W + b)``.

    With two directions there are twice ``num_heads`` heads; the second half scans from T to 1 and
    has parameters of its own.

    Args:
        num_heads: heads per direction, H.
        head_dim: d.
        mini_batch_size: tokens per gradient step, b.
        directions: 1, or 2 for a forth and a back scan.
        learnable_states: how many initial states W₀, b₀ are learnt (Vision-TTT, Fig. 7b): one per
            direction (the default), 1 shared by both directions, or 0 for random ones that stay as
            they were drawn.
        eps: added to the inner norm's variance.

    Initialisation: W₀ normal with standard deviation 0.02, b₀ zero, inner norm the identity,
    position scale 1/j for the j-th token of a mini-batch.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        mini_batch_size: int = 16,
        directions: int = 1,
        learnable_states: int | None = None,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.eps = eps
        if learnable_states is None:
            learnable_states = directions
        if directions not in (1, 2):
            raise ValueError(f"directions must be 1 or 2, got {directions}")
        if not 0 <= learnable_states <= directions:
            raise ValueError(
                f"learnable_states must be in 0 … {directions} with {directions} direction(s), "
                f"got {learnable_states}"
            )
        if mini_batch_size < 1:
            raise ValueError(f"mini_batch_size must be at least 1, got {mini_batch_size}")
        self.num_heads = num_heads
        self.directions = directions
        self.mini_batch_size = mini_batch_size
        heads = directions * num_heads
        states = heads if learnable_states == 0 else learnable_states * num_heads
        w0 = torch.empty(states, head_dim, head_dim)
        b0 = torch.empty(states, head_dim)
        if learnable_states == 0:
            self.register_buffer("w0", w0)
            self.register_buffer("b0", b0)
        else:
            self.w0 = nn.Parameter(w0)
            self.b0 = nn.Parameter(b0)
        self.norm_weight = nn.Parameter(torch.empty(heads, head_dim))
        self.norm_bias = nn.Parameter(torch.empty(heads, head_dim))
        self.position_offset = nn.Parameter(torch.empty(directions, mini_batch_size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the initial state and set the rest to their neutral values."""
        self.w0.normal_(std=0.02)
        self.b0.zero_()
        self.norm_weight.fill_(1)
        self.norm_bias.zero_()
        self.position_offset.zero_()

    def position_scale(self) -> Tensor:
        """p_j = max(0, 1/j + learned offset) of each direction's heads: [directions, b]."""
        offset = self.position_offset
        dtype = torch.promote_types(offset.dtype, torch.float32)
        steps = torch.arange(1, self.mini_batch_size + 1, dtype=dtype, device=offset.device)
        return (1 / steps + offset).clamp(min=0)

    def state(self) -> tuple[Tensor, Tensor]:
        """W₀ [heads, d, d] and b₀ [heads, d] of every head of both directions."""
        copies = self.directions * self.num_heads // self.w0.shape[0]
        if copies == 1:
            return self.w0, self.b0
        return self.w0.repeat(copies, 1, 1), self.b0.repeat(copies, 1)  # directions share one

    @property
    def reverse_heads(self) -> int:
        """The last this-many heads scan from T to 1."""
        return (self.directions - 1) * self.num_heads

    def problem(
        self, q: Tensor, k: Tensor, v: Tensor, eta: Tensor
    ) -> dict[str, Tensor | int | float]:
        """The arguments of :func:`vision_ttt.ops.ttt_linear` for these views."""
        w0, b0 = self.state()
        return {
            "q": q,
            "k": k,
            "v": v,
            "eta": eta,
            "w0": w0,
            "b0": b0,
            "ln_weight": self.norm_weight,
            "ln_bias": self.norm_bias,
            "mini_batch_size": self.mini_batch_size,
            "position_scale": self.position_scale().repeat_interleave(self.num_heads, dim=0),
            "reverse_heads": self.reverse_heads,
            "eps": self.eps,
        }

    def forward(self, q: Tensor, k: Tensor, v: Tensor, eta: Tensor) -> Tensor:
        """Learn from k, v [B, T, heads, d] at rates eta [B, T, heads]; apply it to q."""
        return ttt_linear(**self.problem(q, k, v, eta))

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, head_dim={self.w0.shape[-1]}, "
            f"directions={self.directions}, mini_batch_size={self.mini_batch_size}"
        )
