"""The TTT-MLP layer, and the warm-up of its inner learning rate."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vision_ttt.layers.computed_buffer import ComputedBuffer
from vision_ttt.layers.inner_learner import MLPLearner
from vision_ttt.layers.ttt_layer import OpTTTLayer


class TTTMLP(OpTTTLayer, ComputedBuffer):
    """:class:`TTTLayer` with two-layer inner models, :class:`MLPLearner`: [B, T, D] → [B, T, D].

    Arguments and errors are :class:`TTTLinear`'s. The base learning rate is 0.1 by default, that of
    the TTT paper, which warms it up linearly over the first tenth of training (Appendix C): see
    :func:`warm_up_inner_rates`.
    """

    computed = "warmup"
    learner_class = MLPLearner
    default_rate = 0.1
    learner: MLPLearner
    warmup: Tensor
    warmup_fraction = 1.0

    def add_buffers(self) -> None:
        """Register the fraction of the rates that the warm-up has reached."""
        self.init_non_persistent_buffers()

    def compute_buffer(self, device: torch.device | None) -> Tensor:
        """The fraction, as a tensor, so that a change of its value does not compile again.

        It is not saved: a trained model runs at its full rate.
        """
        return torch.full((), self.warmup_fraction, dtype=torch.float32, device=device)

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
            module.warmup_fraction = fraction
            module.warmup.fill_(fraction)
