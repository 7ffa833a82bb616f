"""The TTT-MLP layer, and the warm-up of its inner learning rate."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vision_ttt.layers.mlp_learner import MLPLearner
from vision_ttt.layers.ttt_layer import TTTLayer


class TTTMLP(TTTLayer):
    """:class:`TTTLayer` with two-layer inner models, :class:`MLPLearner`: [B, T, D] → [B, T, D].

    Args:
        dim: D.
        num_heads: H; D must be a multiple of it.
        mini_batch_size: tokens per gradient step, b.
        learnable_states, state_std, inner_norm: as of :class:`InnerLearner`.
        base_learning_rate: η_base, 0.1 in the TTT paper, which warms it up linearly over the first
            tenth of training (Appendix C): see :func:`warm_up_inner_rates`.
        options: as of :class:`TTTLayer`. Without ``learned_rates`` updates are not scaled by
            position, either.

    Raises:
        ValueError: D is not a multiple of H, or an argument is out of its range.
    """

    learner: MLPLearner
    warmup: Tensor

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        mini_batch_size: int = 16,
        learnable_states: int | None = None,
        state_std: float = 0.02,
        inner_norm: bool = True,
        base_learning_rate: float = 0.1,
        **options: Any,
    ) -> None:
        learner = partial(
            MLPLearner,
            mini_batch_size=mini_batch_size,
            learnable_states=learnable_states,
            state_std=state_std,
            inner_norm=inner_norm,
            scaled=options.get("learned_rates", True),
        )
        super().__init__(dim, num_heads, learner, base_learning_rate=base_learning_rate, **options)
        # A tensor, so that a change of its value does not compile again. Not saved: a trained model
        # runs at its full rate.
        self.register_buffer("warmup", torch.ones((), dtype=torch.float32), persistent=False)

    def init_non_persistent_buffers(self) -> None:
        """Set the buffer that state dicts lack; timm calls it for models made on ``meta``."""
        self.warmup.fill_(1)

    def _scaled(self, rates: Tensor) -> Tensor:
        """The rates of the layer, times the warm-up."""
        return super()._scaled(rates) * self.warmup


@torch.no_grad()
def warm_up_inner_rates(model: nn.Module, fraction: float) -> None:
    """Set the inner learning rate of every :class:`TTTMLP` in ``model`` to this fraction of η_base.

    For the TTT paper's linear warm-up, call it before each training step with
    ``min(1, step / warmup_steps)``.

    Raises:
        ValueError: the fraction is not in 0 … 1.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction must be in 0 … 1, got {fraction}")
    for module in model.modules():
        if isinstance(module, TTTMLP):
            module.warmup.fill_(fraction)
