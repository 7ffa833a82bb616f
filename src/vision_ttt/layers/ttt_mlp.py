"""The TTT-MLP layer, and the warm-up of its inner learning rate."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vision_ttt.layers.inner_learner import MLPLearner
from vision_ttt.layers.ttt_layer import OpTTTLayer


def _refill_from_meta(layer: TTTMLP, _keys: object) -> None:
    """Set the warm-up after ``load_state_dict(…, assign=True)`` into a model made on ``meta``."""
    if layer.warmup.is_meta:
        layer.init_non_persistent_buffers()


class TTTMLP(OpTTTLayer):
    """:class:`TTTLayer` with two-layer inner models, :class:`MLPLearner`: [B, T, D] → [B, T, D].

    Arguments and errors are :class:`TTTLinear`'s. The base learning rate is 0.1 by default, that of
    the TTT paper, which warms it up linearly over the first tenth of training (Appendix C): see
    :func:`warm_up_inner_rates`.
    """

    learner_class = MLPLearner
    default_rate = 0.1
    learner: MLPLearner
    warmup: Tensor

    def add_buffers(self) -> None:
        """Register the fraction of the rates that the warm-up has reached."""
        # A tensor, so that a change of its value does not compile again. Not saved: a trained model
        # runs at its full rate.
        one = torch.ones((), dtype=torch.float32, device=self.out_proj.weight.device)
        self.register_buffer("warmup", one, persistent=False)
        self.register_load_state_dict_post_hook(_refill_from_meta)

    def init_non_persistent_buffers(self) -> None:
        """Set the buffer that state dicts lack; timm calls it for models made on ``meta``."""
        device = self.out_proj.weight.device if self.warmup.is_meta else self.warmup.device
        self.warmup = torch.ones((), dtype=torch.float32, device=device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TTTMLP:
        """Move or cast parameters; a warm-up that leaves ``meta`` is set again."""
        was_meta = self.warmup.is_meta
        super()._apply(fn, recurse)
        if was_meta:
            self.init_non_persistent_buffers()
        return self

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
