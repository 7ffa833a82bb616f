"""The TTT-MLP layer, and the warm-up of its inner learning rate."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from vision_ttt.layers.gated_norm import GatedNorm
from vision_ttt.layers.mlp_learner import MLPLearner
from vision_ttt.layers.ttt_layer import TTTLayer


class TTTMLP(TTTLayer):
    """:class:`TTTLayer` with two-layer inner models, :class:`MLPLearner`: [B, T, D] → [B, T, D].

    Args:
        dim: D.
        num_heads: H; D must be a multiple of it.
        mini_batch_size: tokens per gradient step, b.
        bidirectional: also scan from T to 1, with separate parameters (dual datasets, Sec. 4.3).
        share_qk: project q and k by the same weights.
        conv_kernel_size: taps of the Conv1d on q and on k; 0 for none.
        gate: multiply by GELU(Linear_g(x)) before the output projection.
        learnable_states: see :class:`MLPLearner`; one per direction by default.
        base_learning_rate: η_base, 0.1 in the TTT paper, which warms it up linearly over the first
            tenth of training (Appendix C): see :func:`warm_up_inner_rates`.
        merge, rotary: as of :class:`TTTLayer`.

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
        bidirectional: bool = False,
        share_qk: bool = False,
        conv_kernel_size: int = 0,
        gate: bool = False,
        learnable_states: int | None = None,
        base_learning_rate: float = 0.1,
        merge: type[GatedNorm] = GatedNorm,
        rotary: nn.Module | None = None,
    ) -> None:
        super().__init__(
            dim,
            num_heads,
            partial(MLPLearner, mini_batch_size=mini_batch_size, learnable_states=learnable_states),
            bidirectional=bidirectional,
            share_qk=share_qk,
            conv_kernel_size=conv_kernel_size,
            gate=gate,
            base_learning_rate=base_learning_rate,
            merge=merge,
            rotary=rotary,
        )
        # A tensor, so that a change of its value does not compile again. Not saved: a trained model
        # runs at its full rate.
        self.register_buffer("warmup", torch.ones((), dtype=torch.float32), persistent=False)

    def init_non_persistent_buffers(self) -> None:
        """Set the buffer that state dicts lack; timm calls it for models made on ``meta``."""
        self.warmup.fill_(1)

    def rates(self, logits: Tensor) -> Tensor:
        """η = warm-up · η_base σ(logits) / d."""
        return super().rates(logits) * self.warmup


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
