"""The TTT-Linear layer, for use in any model."""

from __future__ import annotations

from functools import partial
from typing import Any

from vision_ttt.layers.linear_learner import LinearLearner
from vision_ttt.layers.ttt_layer import TTTLayer


class TTTLinear(TTTLayer):
    """:class:`TTTLayer` with linear inner models, :class:`LinearLearner`: [B, T, D] → [B, T, D].

    Args:
        dim: D.
        num_heads: H; D must be a multiple of it.
        mini_batch_size: tokens per gradient step, b.
        learnable_states, state_std, inner_norm: as of :class:`InnerLearner`.
        base_learning_rate: η_base.
        options: as of :class:`TTTLayer`. Without ``learned_rates`` updates are not scaled by
            position, either.

    Raises:
        ValueError: D is not a multiple of H, or an argument is out of its range.
    """

    learner: LinearLearner

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        mini_batch_size: int = 16,
        learnable_states: int | None = None,
        state_std: float = 0.02,
        inner_norm: bool = True,
        base_learning_rate: float = 1.0,
        **options: Any,
    ) -> None:
        learner = partial(
            LinearLearner,
            mini_batch_size=mini_batch_size,
            learnable_states=learnable_states,
            state_std=state_std,
            inner_norm=inner_norm,
            scaled=options.get("learned_rates", True),
        )
        super().__init__(dim, num_heads, learner, base_learning_rate=base_learning_rate, **options)
