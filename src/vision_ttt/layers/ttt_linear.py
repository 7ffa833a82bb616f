"""The TTT-Linear layer, for use in any model."""

from __future__ import annotations

from functools import partial

from torch import nn

from vision_ttt.layers.gated_norm import GatedNorm
from vision_ttt.layers.linear_learner import LinearLearner
from vision_ttt.layers.ttt_layer import TTTLayer


class TTTLinear(TTTLayer):
    """:class:`TTTLayer` with linear inner models, :class:`LinearLearner`: [B, T, D] → [B, T, D].

    Args:
        dim: D.
        num_heads: H; D must be a multiple of it.
        mini_batch_size: tokens per gradient step, b.
        bidirectional: also scan from T to 1, with separate parameters (dual datasets, Sec. 4.3).
        share_qk: project q and k by the same weights.
        conv_kernel_size: taps of the Conv1d on q and on k; 0 for none.
        gate: multiply by GELU(Linear_g(x)) before the output projection.
        learnable_states: see :class:`LinearLearner`; one per direction by default.
        base_learning_rate: η_base.
        merge, rotary: as of :class:`TTTLayer`.

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
        bidirectional: bool = False,
        share_qk: bool = False,
        conv_kernel_size: int = 0,
        gate: bool = False,
        learnable_states: int | None = None,
        base_learning_rate: float = 1.0,
        merge: type[GatedNorm] = GatedNorm,
        rotary: nn.Module | None = None,
    ) -> None:
        super().__init__(
            dim,
            num_heads,
            partial(
                LinearLearner, mini_batch_size=mini_batch_size, learnable_states=learnable_states
            ),
            bidirectional=bidirectional,
            share_qk=share_qk,
            conv_kernel_size=conv_kernel_size,
            gate=gate,
            base_learning_rate=base_learning_rate,
            merge=merge,
            rotary=rotary,
        )
