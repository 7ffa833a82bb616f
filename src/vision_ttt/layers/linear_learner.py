"""The inner learner of TTT-Linear as a module: it holds the initial state and calls the op."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vision_ttt.layers.inner_learner import InnerLearner
from vision_ttt.ops import LinearState, ttt_linear


class LinearLearner(InnerLearner):
    """Linear inner models, one per head, trained along the tokens with ``f(x) = x + LN(x W + b)``.

    Arguments, initialisation and errors are :class:`InnerLearner`'s; the initial state is
    ``w0`` [heads, d, d] and ``b0`` [heads, d].
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
        super().__init__(
            {"w0": (head_dim, head_dim), "b0": (head_dim,)},
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
        state: LinearState | None = None,
        return_state: bool = False,
        lengths: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, LinearState]:
        """Learn from k, v [B, T, heads, d] at rates eta [B, T, heads]; apply it to q."""
        problem = self.problem(q, k, v, eta)
        return ttt_linear(**problem, state=state, return_state=return_state, lengths=lengths)
