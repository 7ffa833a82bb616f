"""The TTT-Linear layer: tokens in, tokens out, to be used in any model."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from vision_ttt.layers.directional_conv1d import DirectionalConv1d
from vision_ttt.layers.gated_norm import GatedNorm
from vision_ttt.layers.linear_learner import LinearLearner
from vision_ttt.layers.overwriting import may_overwrite
from vision_ttt.layers.plain_calls import does_as, is_plain
from vision_ttt.layers.ttt_layer import TTTLayer
from vision_ttt.ops import fused_ttt_linear
from vision_ttt.ops._native import kernels_serve


class TTTLinear(TTTLayer):
    """:class:`TTTLayer` with linear inner models, :class:`LinearLearner`: [B, T, D] → [B, T, D].

    On a CPU in float32 everything between the projections runs as one op.

    Args:
        dim: D.
        num_heads: H; D must be a multiple of it.
        mini_batch_size: tokens per gradient step, b.
        bidirectional: also scan from T to 1, with parameters of its own (dual datasets, Sec. 4.3).
        share_qk: project q and k by the same weights.
        conv_kernel_size: taps of the Conv1d on q and on k; 0 for none.
        gate: multiply by GELU(Linear_g(x)) before the output projection.
        learnable_states: see :class:`LinearLearner`; one per direction by default.
        base_learning_rate: η_base.

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
        )

    def inner_problem(self, x: Tensor) -> dict[str, Tensor | int]:
        """The inner learner's data, state and rates: what :func:`vision_ttt.ttt_linear` gets."""
        q, k, v, eta, _ = self.views(x)
        return self.learner.problem(q, k, v, eta)

    def forward(self, x: Tensor) -> Tensor:
        if not self._is_plain():
            return super().forward(x)
        projected, rate_logits = self.in_proj(x), self.rate_proj(x)
        if not kernels_serve(projected, *self._weights()):
            return self._answer(*self._views(projected, rate_logits))
        return self.out_proj(self._fused(projected, rate_logits))

    def _is_plain(self) -> bool:
        """Whether all between the projections is as published, and nobody listens."""
        return (
            does_as(self, TTTLinear)
            and is_plain(self.conv_q, DirectionalConv1d)
            and is_plain(self.conv_k, DirectionalConv1d)
            and is_plain(self.learner, LinearLearner)
            and is_plain(self.merge, GatedNorm)
            and self._parts_agree()
        )

    def _parts_agree(self) -> bool:
        """Whether one op can stand for parts of such shapes."""
        conv_q, conv_k, learner = self.conv_q, self.conv_k, self.learner
        dim = learner.num_heads * self.head_dim
        reverse_channels = learner.reverse_heads * self.head_dim
        return (
            fused_ttt_linear.fits(self.head_dim, dim, learner.mini_batch_size)
            and conv_q.weight.shape == conv_k.weight.shape
            and conv_q.weight.shape[0] == self.heads * self.head_dim
            and conv_q.reverse_channels == conv_k.reverse_channels == reverse_channels
            and self.merge.weight.numel() == self.heads * self.head_dim
            and self.merge.weight.shape[1] == dim
        )

    def _weights(self) -> tuple[Tensor, ...]:
        """Those the one op reads as they are; it takes the learner's in any precision."""
        conv_q, conv_k, merge = self.conv_q, self.conv_k, self.merge
        return conv_q.weight, conv_q.bias, conv_k.weight, conv_k.bias, merge.weight, merge.bias

    def _fused(self, projected: Tensor, rate_logits: Tensor) -> Tensor:
        """What stands between the projections, in one op: :class:`TTTLayer`'s composition."""
        learner, merge = self.learner, self.merge
        return fused_ttt_linear.fused_ttt_linear(
            projected,
            rate_logits,
            (self.conv_q.weight, self.conv_q.bias),
            (self.conv_k.weight, self.conv_k.bias),
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
            in_place=may_overwrite() and is_plain(self.in_proj, nn.Linear),
        )
