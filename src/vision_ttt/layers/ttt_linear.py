"""The TTT-Linear layer: tokens in, tokens out, to be used in any model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vision_ttt.layers.directional_conv1d import DirectionalConv1d
from vision_ttt.layers.gated_norm import GatedNorm
from vision_ttt.layers.linear_learner import LinearLearner
from vision_ttt.layers.overwriting import may_overwrite
from vision_ttt.ops import fused_ttt_linear
from vision_ttt.ops._native import kernels_serve


class TTTLinear(nn.Module):
    """Sequence layer whose state is a linear model trained on the tokens: [B, T, D] → [B, T, D].

    Per direction, with x the input (TTT, Sec. 2.3-2.7; Vision-TTT, Algorithm 1, lines 7-21)::

        q, k, v = Linear(x)                       no bias; q = k where shared
        q, k    = Conv1d_q(q), Conv1d_k(k)        depth-wise, causal in scan direction
        η       = η_base σ(Linear(x)) / d         per token and head
        z       = LN_post(TTT-Linear(q, k, v, η))

    and the output is Linear_o(z), with two directions Linear_o(z_forth + z_back), with a gate
    Linear_o(GELU(Linear_g(x)) ⊙ …), no biases. The bare layer (the defaults) is the first row of
    Vision-TTT's Table 3; with everything switched on it is what a Vittt block holds.

    Args:
        dim: D.
        num_heads: H; D must be a multiple of it.
        mini_batch_size: tokens per gradient step, b.
        bidirectional: also scan from T to 1, with parameters of its own (dual datasets, Sec. 4.3).
        share_qk: project q and k by the same weights.
        conv_kernel_size: taps of the Conv1d on q and on k; 0 for none.
        gate: multiply by GELU(Linear_g(x)) before the output projection.
        learnable_states: see :class:`LinearLearner`; one per direction by default.
        base_learning_rate: η_base.

    Raises:
        ValueError: D is not a multiple of H, or an argument is out of its range.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        mini_batch_size: int = 16,
        bidirectional: bool = False,
        share_qk: bool = False,
        conv_kernel_size: int = 0,
        gate: bool = False,
        learnable_states: int | None = None,
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
        # One matrix product serves every wide projection of x. The rates stay out of it: their few
        # columns would break its alignment, which costs more than a product of their own.
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
        self.learner = LinearLearner(
            num_heads,
            self.head_dim,
            mini_batch_size=mini_batch_size,
            directions=directions,
            learnable_states=learnable_states,
        )
        # Whether one op can stand for the convolutions, the learner and the merge.
        self._fits = conv_kernel_size > 0 and fused_ttt_linear.fits(
            self.head_dim, dim, mini_batch_size
        )
        self.merge = GatedNorm(dim, directions)
        self.out_proj = nn.Linear(dim, dim, bias=False)
        for projection in (self.in_proj, self.rate_proj, self.out_proj):
            nn.init.trunc_normal_(projection.weight, std=0.02)
        nn.init.zeros_(self.rate_proj.bias)

    def views(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """q, k, v [B, T, heads, d], eta [B, T, heads] and the gate's logits [B, T, D] or None."""
        return self._views(self.in_proj(x), self.rate_proj(x))

    def _views(
        self, projected: Tensor, rate_logits: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        k, q, v, gate = projected.split(list(self.widths.values()), dim=-1)
        if not self.widths["q"]:
            q = k
        q, k = self.conv_q(q), self.conv_k(k)
        q, k, v = (view.unflatten(-1, (self.heads, self.head_dim)) for view in (q, k, v))
        # Rates are at least float32: they multiply sums of gradients whatever the views' precision.
        logits = rate_logits.to(torch.promote_types(rate_logits.dtype, torch.float32))
        eta = torch.sigmoid(logits) * (self.base_learning_rate / self.head_dim)
        return q, k, v, eta, gate if self.widths["gate"] else None

    def inner_problem(self, x: Tensor) -> dict[str, Tensor | int]:
        """The inner learner's data, state and rates: what :func:`vision_ttt.ttt_linear` gets."""
        q, k, v, eta, _ = self.views(x)
        return self.learner.problem(q, k, v, eta)

    def forward(self, x: Tensor) -> Tensor:
        projected, rate_logits = self.in_proj(x), self.rate_proj(x)
        if self._fits and kernels_serve(projected):
            return self.out_proj(self._fused(projected, rate_logits))
        q, k, v, eta, gate = self._views(projected, rate_logits)
        z = self.learner(q, k, v, eta).flatten(2)  # [B, T, directions · D]
        return self.out_proj(self.merge(z, gate))

    def _fused(self, projected: Tensor, rate_logits: Tensor) -> Tensor:
        """What stands between the projections, in one op: the composition in :meth:`forward`."""
        learner, merge = self.learner, self.merge
        return fused_ttt_linear.fused_ttt_linear(
            projected,
            rate_logits,
            (self.conv_q.weight, self.conv_q.bias),
            (self.conv_k.weight, self.conv_k.bias),
            learner.state(),
            (learner.norm_weight, learner.norm_bias),
            learner.position_scale(),
            (merge.weight, merge.bias),
            widths=list(self.widths.values()),
            mini_batch_size=learner.mini_batch_size,
            reverse_heads=learner.reverse_heads,
            base_learning_rate=self.base_learning_rate,
            inner_eps=learner.eps,
            post_eps=merge.eps,
            in_place=may_overwrite(self.in_proj),
        )
