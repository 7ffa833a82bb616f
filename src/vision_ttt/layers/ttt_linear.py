"""The TTT-Linear layer, for use in any model."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from vision_ttt.layers.fusable import Fusable
from vision_ttt.layers.gated_norm import GatedNorm
from vision_ttt.layers.linear_learner import LinearLearner
from vision_ttt.layers.ttt_layer import TTTLayer, TTTLayerState
from vision_ttt.ops import fused_ttt_linear, linear, linear_pair


class TTTLinear(TTTLayer, Fusable):
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
        fused: run everything between the projections as one op,
            :func:`vision_ttt.ops.fused_ttt_linear`, which computes the same from the same
            parameters and keeps less for the backward pass; the projections run as
            :func:`vision_ttt.ops.linear_pair` and :func:`vision_ttt.ops.linear`. All parts then
            only hold parameters, see :class:`vision_ttt.layers.fusable.Fusable`: hooks on them do
            not run, and replacing one is an error until ``fused`` is set to False.

    Raises:
        ValueError: D is not a multiple of H, an argument is out of its range, or ``fused`` is set
            without a Conv1d, with ``rotary`` or with another ``merge``.
        TypeError: ``fused`` is set for a subclass that overrides ``views`` or ``rates``.
    """

    learner: LinearLearner
    fused_parts = (
        "in_proj",
        "rate_proj",
        "conv_q",
        "conv_k",
        "rotary",
        "learner",
        "merge",
        "out_proj",
    )
    fused_methods = ("views", "rates")

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
        fused: bool = False,
    ) -> None:
        if fused and not conv_kernel_size:
            raise ValueError("fused needs a Conv1d on q and k, got conv_kernel_size=0")
        if fused and (rotary is not None or merge is not GatedNorm):
            part = merge.__name__ if rotary is None else f"rotary={type(rotary).__name__}"
            raise ValueError(f"fused has no {part}: its op neither rotates nor has other gates")
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
        if fused:
            self.switch_on()

    def forward(
        self,
        x: Tensor,
        state: TTTLayerState | None = None,
        return_state: bool = False,
        lengths: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, TTTLayerState]:
        """As :class:`TTTLayer`; with a state the parts run also where ``fused`` is set."""
        if not self.fused or state is not None or return_state:
            return super().forward(x, state, return_state, lengths)
        conv_q, conv_k, learner, merge = self.conv_q, self.conv_k, self.learner, self.merge
        rate_proj = self.rate_proj
        projected, rates = linear_pair(
            x, self.in_proj.weight, (rate_proj.weight, rate_proj.bias)
        )  # [B, T, C], [B, T, H]
        mixed = fused_ttt_linear(
            projected,
            rates,
            (conv_q.weight, conv_q.bias),
            (conv_k.weight, conv_k.bias),
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
        )  # [B, T, D]
        return linear(mixed, self.out_proj.weight)
