"""The TTT-Linear layer, for use in any model."""

from __future__ import annotations

from vision_ttt.layers.inner_learner import LinearLearner
from vision_ttt.layers.ttt_layer import OpTTTLayer


class TTTLinear(OpTTTLayer):
    """:class:`TTTLayer` with linear inner models, :class:`LinearLearner`: [B, T, D] → [B, T, D].

    Args:
        dim: D.
        num_heads: H; D must be a multiple of it.
        mini_batch_size: tokens per gradient step, b.
        bidirectional: also scan from T to 1, with separate parameters (dual datasets, Sec. 4.3).
        share_qk: project q and k by the same weights.
        conv_kernel_size: taps of the Conv1d on q and on k; 0 for none.
        gate: multiply by GELU(Linear_g(x)) before the output projection.
        learnable_states, state_std, inner_norm: as of :class:`LinearLearner`.
        base_learning_rate: η_base, 1 by default.
        learned_rates: as of :class:`TTTLayer`. Without them updates are not scaled by position,
            either.
        merge, rotary: as of :class:`TTTLayer`.

    Raises:
        ValueError: D is not a multiple of H, or an argument is out of its range.
    """

    learner_class = LinearLearner
    default_rate = 1.0
    learner: LinearLearner
