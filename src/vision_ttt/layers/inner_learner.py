"""The inner learners of TTT-Linear and TTT-MLP: state, inner norm, position scale."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vision_ttt.layers.computed_buffer import ComputedBuffer
from vision_ttt.ops import ttt_linear, ttt_mlp


class InnerLearner(ComputedBuffer):
    """Inner models, one per head, with the parameters of an op of ``vision_ttt.ops``.

    With two directions there are twice ``num_heads`` heads; the second half scans from T to 1 and
    has its own parameters. Subclasses name their op and the shapes of the initial state.

    Args:
        num_heads: heads per direction, H.
        head_dim: d.
        mini_batch_size: tokens per gradient step, b.
        directions: 1, or 2 for a forward and a backward scan.
        learnable_states: number of learned initial states (Vision-TTT, Fig. 7b): one per direction
            (the default), 1 shared by both directions, or 0 for random ones that are not trained.
        state_std: standard deviation of the state's matrices at the beginning.
        inner_norm: f(x) = x + LN(…). False: the inner model has neither norm nor residual.
        scaled: scale the update that the j-th token of a mini-batch sees by 1/j and a learned
            offset. False: by 1.
        eps: added to the inner norm's variance.

    Initialisation: the state's matrices normal, its biases zero, inner norm the identity, position
    scale 1/j for the j-th token of a mini-batch.

    Raises:
        ValueError: an argument is out of its range.
    """

    computed = "inverse_steps"

    op: ClassVar[Callable[..., Any]]
    """The op, e.g. :func:`vision_ttt.ttt_linear`."""

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        mini_batch_size: int = 16,
        directions: int = 1,
        learnable_states: int | None = None,
        state_std: float = 0.02,
        inner_norm: bool = True,
        scaled: bool = True,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.state_std = state_std
        state_shapes = self.state_shapes(head_dim)
        if learnable_states is None:
            learnable_states = directions
        if num_heads < 1:
            raise ValueError(f"num_heads must be at least 1, got {num_heads}")
        if directions not in (1, 2):
            raise ValueError(f"directions must be 1 or 2, got {directions}")
        if not 0 <= learnable_states <= directions:
            raise ValueError(
                f"learnable_states must be in 0 … {directions} with {directions} direction(s), "
                f"got {learnable_states}"
            )
        if mini_batch_size < 1:
            raise ValueError(f"mini_batch_size must be at least 1, got {mini_batch_size}")
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.directions = directions
        self.mini_batch_size = mini_batch_size
        self.state_names = tuple(state_shapes)
        heads = directions * num_heads
        states = heads if learnable_states == 0 else learnable_states * num_heads
        self._copies = heads // states
        for name, shape in state_shapes.items():
            x = torch.empty(states, *shape)
            if learnable_states == 0:
                self.register_buffer(name, x)
            else:
                self.register_parameter(name, nn.Parameter(x))
        for name in ("norm_weight", "norm_bias"):
            x = nn.Parameter(torch.empty(heads, head_dim)) if inner_norm else None
            self.register_parameter(name, x)
        offset = nn.Parameter(torch.empty(directions, mini_batch_size)) if scaled else None
        self.register_parameter("position_offset", offset)
        self.init_non_persistent_buffers()
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the initial state and set the other parameters to their neutral values."""
        for name in self.state_names:
            x = getattr(self, name)
            if x.ndim > 2 and self.state_std:  # [heads, i, j]; zeros draw no random numbers
                nn.init.normal_(x, std=self.state_std)
            else:
                nn.init.zeros_(x)
        if self.norm_weight is not None:
            nn.init.ones_(self.norm_weight)
            nn.init.zeros_(self.norm_bias)
        if self.position_offset is not None:
            nn.init.zeros_(self.position_offset)

    def compute_buffer(self, device: torch.device | None) -> Tensor | None:
        """1/j for j = 1 … b, in at least float32; None where updates are not scaled."""
        if self.position_offset is None:
            return None
        dtype = torch.promote_types(self.position_offset.dtype, torch.float32)
        steps = torch.arange(1, self.mini_batch_size + 1, dtype=dtype, device=device)
        return 1 / steps

    def no_weight_decay(self) -> set[str]:
        """All parameters."""
        return {name for name, _ in self.named_parameters()}

    def position_scale(self) -> Tensor | None:
        """p_j = max(0, 1/j + learned offset) of each direction's heads: [directions, b].

        None where updates are not scaled.

        Raises:
            ValueError: ``position_offset`` has another shape.
        """
        if self.position_offset is None:
            return None
        return _position_scale(self.position_offset, self.inverse_steps, self.directions)

    def state(self) -> tuple[Tensor, ...]:
        """The initial state [heads, …] of every head of both directions."""
        tensors = tuple(getattr(self, name) for name in self.state_names)
        if self._copies == 1:
            return tensors
        return tuple(torch.cat([x] * self._copies) for x in tensors)  # both directions share one

    @property
    def reverse_heads(self) -> int:
        """The number of heads, the last ones, that scan from T to 1."""
        return (self.directions - 1) * self.num_heads

    def problem(
        self, q: Tensor, k: Tensor, v: Tensor, eta: Tensor
    ) -> dict[str, Tensor | int | float | None]:
        """The op's arguments for the views q, k, v [B, T, heads, d] and eta [B, T, heads]."""
        return {
            "q": q,
            "k": k,
            "v": v,
            "eta": eta,
            **dict(zip(self.state_names, self.state(), strict=True)),
            "ln_weight": self.norm_weight,
            "ln_bias": self.norm_bias,
            "mini_batch_size": self.mini_batch_size,
            "position_scale": self._of_each_head(self.position_scale()),
            "reverse_heads": self.reverse_heads,
            "eps": self.eps,
        }

    def _of_each_head(self, x: Tensor | None) -> Tensor | None:
        """x [directions, b] repeated for the heads of each direction: [heads, b]."""
        return None if x is None else x.repeat_interleave(self.num_heads, dim=0)

    @staticmethod
    @abstractmethod
    def state_shapes(head_dim: int) -> dict[str, tuple[int, ...]]:
        """Name of each tensor of the initial state → its shape after [heads]."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        eta: Tensor,
        state: Any = None,
        return_state: bool = False,
        lengths: Tensor | None = None,
    ) -> Any:
        """Learn from k, v [B, T, heads, d] at rates eta [B, T, heads]; apply it to q.

        The tokens are the next ones of a sequence where its ``state`` is given. With
        ``return_state`` the result is (o, state). Where ``lengths`` [B] are given, the state is
        the one after so many tokens of each sequence, and what is behind them is not read.
        """
        problem = self.problem(q, k, v, eta)
        return self.op(**problem, state=state, return_state=return_state, lengths=lengths)

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, head_dim={self.head_dim}, "
            f"directions={self.directions}, mini_batch_size={self.mini_batch_size}"
        )


class LinearLearner(InnerLearner):
    """Linear inner models, one per head, trained along the tokens with ``f(x) = x + LN(x W + b)``.

    Arguments, initialisation and errors are :class:`InnerLearner`'s; the initial state is
    ``w0`` [heads, d, d] and ``b0`` [heads, d].
    """

    op = staticmethod(ttt_linear)

    @staticmethod
    def state_shapes(head_dim: int) -> dict[str, tuple[int, ...]]:
        return {"w0": (head_dim, head_dim), "b0": (head_dim,)}


class MLPLearner(InnerLearner):
    """Two-layer inner models, one per head: ``f(x) = x + LN(GELU(x W₁ + b₁) W₂ + b₂)``.

    Arguments, initialisation and errors are :class:`InnerLearner`'s; the initial state is
    ``w1`` [heads, d, 4d], ``b1`` [heads, 4d], ``w2`` [heads, 4d, d] and ``b2`` [heads, d]
    (TTT, Sec. 2.7).
    """

    op = staticmethod(ttt_mlp)

    @staticmethod
    def state_shapes(head_dim: int) -> dict[str, tuple[int, ...]]:
        hidden = 4 * head_dim
        return {
            "w1": (head_dim, hidden),
            "b1": (hidden,),
            "w2": (hidden, head_dim),
            "b2": (head_dim,),
        }


@torch.fx.wrap
def _position_scale(offset: Tensor, inverse_steps: Tensor, directions: int) -> Tensor:
    if offset.shape != (directions, *inverse_steps.shape):
        raise ValueError(
            f"position_offset must have shape [{directions}, {len(inverse_steps)}], got "
            f"{list(offset.shape)}"
        )
    return (inverse_steps + offset).clamp(min=0)
