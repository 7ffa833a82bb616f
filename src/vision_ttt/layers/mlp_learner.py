"""The inner learner of TTT-MLP as a module: it holds the initial state and calls the op."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vision_ttt.layers.inner_learner import InnerLearner
from vision_ttt.ops import MLPState, ttt_mlp


class MLPLearner(InnerLearner):
    """Two-layer inner models, one per head: ``f(x) = x + LN(GELU(x W₁ + b₁) W₂ + b₂)``.

    Arguments, initialisation and errors are :class:`InnerLearner`'s; the initial state is
    ``w1`` [heads, d, 4d], ``b1`` [heads, 4d], ``w2`` [heads, 4d, d] and ``b2`` [heads, d]
    (TTT, Sec. 2.7).
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        mini_batch_size: int = 16,
        directions: int = 1,
        **options: Any,
    ) -> None:
        hidden = 4 * head_dim
        super().__init__(
            {
                "w1": (head_dim, hidden),
                "b1": (hidden,),
                "w2": (hidden, head_dim),
                "b2": (head_dim,),
            },
            num_heads,
            head_dim,
            mini_batch_size=mini_batch_size,
            directions=directions,
            **options,
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        eta: Tensor,
        state: MLPState | None = None,
        return_state: bool = False,
        lengths: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, MLPState]:
        """Learn from k, v [B, T, heads, d] at rates eta [B, T, heads]; apply it to q."""
        problem = self.problem(q, k, v, eta)
        return ttt_mlp(**problem, state=state, return_state=return_state, lengths=lengths)
