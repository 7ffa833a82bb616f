"""The TTT-Linear layer: tokens in, tokens out, to be used in any model."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from vision_ttt.layers.linear_learner import LinearLearner
from vision_ttt.layers.ttt_layer import TTTLayer
from vision_ttt.ops import fused_ttt_linear

FUSED_PARTS = ("conv_q", "conv_k", "learner", "merge")
"""Modules that only hold parameters where the layer is fused."""
FUSED_METHODS = ("views", "rates")
"""Methods that are not called where the layer is fused."""


class TTTLinear(TTTLayer):
    """:class:`TTTLayer` with linear inner models, :class:`LinearLearner`: [B, T, D] → [B, T, D].

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
        fused: run what stands between the projections as one op,
            :func:`vision_ttt.ops.fused_ttt_linear`, which computes the same from the same
            parameters and keeps less for the backward pass. ``conv_q``, ``conv_k``, ``learner`` and
            ``merge`` then only hold parameters: hooks on them do not run, and replacing one is an
            error until ``fused`` is set to False, which one may at any time.

    Raises:
        ValueError: D is not a multiple of H, an argument is out of its range, or ``fused`` is asked
            for without a Conv1d.
        TypeError: ``fused`` is asked of a subclass that overrides ``views`` or ``rates``.
    """

    learner: LinearLearner
    fused: bool = False

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
        fused: bool = False,
    ) -> None:
        if fused:
            _refuse_overrides(type(self))
            if not conv_kernel_size:
                raise ValueError("fused needs a Conv1d on q and k, got conv_kernel_size=0")
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
        self.__dict__["fused"] = fused  # assigned, it can only be switched off

    def inner_problem(self, x: Tensor) -> dict[str, Tensor | int]:
        """The inner learner's data, state and rates: what :func:`vision_ttt.ttt_linear` gets."""
        q, k, v, eta, _ = self.views(x)
        return self.learner.problem(q, k, v, eta)

    def forward(self, x: Tensor) -> Tensor:
        if not self.fused:
            return super().forward(x)
        conv_q, conv_k, learner, merge = self.conv_q, self.conv_k, self.learner, self.merge
        mixed = fused_ttt_linear(
            self.in_proj(x),
            self.rate_proj(x),
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
        return self.out_proj(mixed)

    def __setattr__(self, name: str, value: Any) -> None:
        self._refuse_to_ignore(name, value)
        super().__setattr__(name, value)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        self._refuse_to_ignore(name, module)
        super().add_module(name, module)

    def _refuse_to_ignore(self, name: str, value: Any) -> None:
        """Raise where the fused op would go on as if nothing had been assigned."""
        if name == "fused" and value and not self.fused:
            raise ValueError("TTTLinear: fused can be switched off later, not on")
        if self.fused and name in (*FUSED_PARTS, *FUSED_METHODS):
            raise ValueError(
                f"TTTLinear: {name} is not called while fused is True, which makes one op of "
                f"{', '.join(FUSED_PARTS)}; set fused = False before replacing it"
            )
        if self.fused and name == "__class__":
            _refuse_overrides(value)

    def extra_repr(self) -> str:
        return "fused=True" if self.fused else ""


def _refuse_overrides(kind: type[TTTLinear]) -> None:
    """Raise unless the class leaves what the fused op computes as :class:`TTTLinear` has it."""
    for name in FUSED_METHODS:
        if getattr(kind, name) is not getattr(TTTLinear, name):
            raise TypeError(
                f"{kind.__name__} overrides {name}, which is not called where fused is True"
            )
