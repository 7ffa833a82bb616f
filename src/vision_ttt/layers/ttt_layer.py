"""The TTT layer around any inner learner, for use in any model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vision_ttt.layers.directional_conv1d import DirectionalConv1d
from vision_ttt.layers.gated_norm import GatedNorm


class TTTLayer(nn.Module):
    """Sequence layer whose state is a model trained on the tokens: [B, T, D] → [B, T, D].

    Per direction, with x the input (TTT, Sec. 2.3-2.7; Vision-TTT, Algorithm 1, lines 7-21)::

        q, k, v = Linear(x)                       no bias; q = k where shared
        q, k    = Conv1d_q(q), Conv1d_k(k)        depth-wise, causal in scan direction
        η       = η_base σ(Linear(x)) / d         per token and head
        z       = LN_post(learner(q, k, v, η))

    and the output is Linear_o(z), with two directions Linear_o(z_forward + z_backward), with a gate
    Linear_o(GELU(Linear_g(x)) ⊙ …), no biases. The defaults give the first row of Vision-TTT's
    Table 3; all options together give the layer of a Vittt block.

    Args:
        dim: D.
        num_heads: H; D must be a multiple of it.
        learner: returns the inner learner for ``learner(num_heads, head_dim, directions=…)``: a
            module (q, k, v [B, T, heads, d], η [B, T, heads]) → [B, T, heads, d] for
            heads = directions · H, the second half of two directions scanning from T to 1. E.g.
            :class:`LinearLearner`, ``functools.partial(MLPLearner, mini_batch_size=8)``.
        bidirectional: also scan from T to 1, with separate parameters (dual datasets, Sec. 4.3).
        share_qk: project q and k by the same weights.
        conv_kernel_size: taps of the Conv1d on q and on k; 0 for none.
        gate: multiply by GELU(Linear_g(x)) before the output projection.
        base_learning_rate: η_base.

    Raises:
        ValueError: D is not a multiple of H, or an argument is out of its range.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        learner: Callable[..., nn.Module],
        *,
        bidirectional: bool = False,
        share_qk: bool = False,
        conv_kernel_size: int = 0,
        gate: bool = False,
        base_learning_rate: float = 1.0,
    ) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise ValueError(f"dim must be a multiple of num_heads, got {dim} and {num_heads}")
        directions = 2 if bidirectional else 1
        self.heads = directions * num_heads
        self.head_dim = dim // num_heads
        self.base_learning_rate = base_learning_rate
        inner = directions * dim
        # One matrix product computes all wide projections of x. The rates have their own: their few
        # columns would break the product's alignment, which costs more.
        self.widths = {
            "k": inner,
            "q": 0 if share_qk else inner,
            "v": inner,
            "gate": dim if gate else 0,
        }
        self.in_proj = nn.Linear(dim, sum(self.widths.values()), bias=False)
        self.rate_proj = nn.Linear(dim, self.heads)
        if conv_kernel_size:
            self.conv_q, self.conv_k = (
                DirectionalConv1d(inner, conv_kernel_size, reverse_channels=inner - dim)
                for _ in range(2)
            )
        else:
            self.conv_q, self.conv_k = nn.Identity(), nn.Identity()
        self.learner = learner(num_heads, self.head_dim, directions=directions)
        self.merge = GatedNorm(dim, directions)
        self.out_proj = nn.Linear(dim, dim, bias=False)
        for projection in (self.in_proj, self.rate_proj, self.out_proj):
            nn.init.trunc_normal_(projection.weight, std=0.02)
        nn.init.zeros_(self.rate_proj.bias)

    def views(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """q, k, v [B, T, heads, d], eta [B, T, heads] and the gate's logits [B, T, D] or None."""
        k, q, v, gate = self.in_proj(x).split_with_sizes(list(self.widths.values()), dim=-1)
        if not self.widths["q"]:
            q = k
        q, k = self.conv_q(q), self.conv_k(k)
        q, k, v = (view.unflatten(-1, (self.heads, self.head_dim)) for view in (q, k, v))
        # Rates are at least float32, as the sums of gradients that they multiply.
        eta = self.rates(_at_least_float32(self.rate_proj(x)))
        return q, k, v, eta, gate if self.widths["gate"] else None

    def rates(self, logits: Tensor) -> Tensor:
        """η = η_base σ(logits) / d (TTT, Sec. 2.7)."""
        return torch.sigmoid(logits) * (self.base_learning_rate / self.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, eta, gate = self.views(x)
        z = self.learner(q, k, v, eta).flatten(2)  # [B, T, directions · D]
        return self.out_proj(self.merge(z, gate))


@torch.fx.wrap
def _at_least_float32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
