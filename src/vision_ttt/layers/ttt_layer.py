"""The TTT layer around any inner learner, for use in any model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from vision_ttt.layers.directional_conv1d import DirectionalConv1d
from vision_ttt.layers.gated_norm import GatedNorm
from vision_ttt.layers.inner_learner import InnerLearner
from vision_ttt.ops import LinearState, MLPState, states
from vision_ttt.ops.padding import fill_padding, padding_of

Views = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


class TTTLayerState(NamedTuple):
    """What a :class:`TTTLayer` of one direction needs to go on after any token.

    ``learner`` is its inner learner's, ``conv_q`` and ``conv_k`` are the last tokens that its
    convolutions have seen [B, k - 1, D], None without convolutions.
    """

    learner: LinearState | MLPState
    conv_q: Tensor | None = None
    conv_k: Tensor | None = None

    detach = states.detach
    select = states.select
    tensors = states.tensors
    to = states.to


class TTTLayer(nn.Module):
    """Sequence layer whose state is a model trained on the tokens: [B, T, D] → [B, T, D].

    Per direction, with x the input (TTT, Sec. 2.3-2.7; Vision-TTT, Algorithm 1, lines 7-21)::

        q, k, v = Linear(x)                       no bias; q = k where shared
        q, k    = Conv1d_q(q), Conv1d_k(k)        depth-wise, causal in scan direction
        η       = η_base σ(Linear(x)) / d         per token and head
        z       = LN_post(learner(q, k, v, η))

    and the output is Linear_o(z), with two directions Linear_o(z_forward + z_backward), with a gate
    Linear_o(GELU(Linear_g(x)) ⊙ …), no biases. The defaults give the first row of Vision-TTT's
    Table 3; all options together give the layer of a Vittt block.

    Args:
        dim: D.
        num_heads: H; D must be a multiple of it.
        learner: returns the inner learner for ``learner(num_heads, head_dim, directions=…)``: a
            module (q, k, v [B, T, heads, d], η [B, T, heads]) → [B, T, heads, d] for
            heads = directions · H, the second half of two directions scanning from T to 1. E.g.
            :class:`LinearLearner`, ``functools.partial(MLPLearner, mini_batch_size=8)``.
        bidirectional: also scan from T to 1, with separate parameters (dual datasets, Sec. 4.3).
        share_qk: project q and k by the same weights.
        conv_kernel_size: taps of the Conv1d on q and on k; 0 for none.
        gate: multiply by GELU(Linear_g(x)) before the output projection.
        merge: the class of the norms behind the learner and of the gate.
        base_learning_rate: η_base.
        learned_rates: compute η of each token. False: η = η_base / d for all.
        rotary: (x [B, T, heads, d], position) → x rotated, applied to q and k after their
            convolutions, e.g. :class:`vision_ttt.layers.MiniBatchRotary`; the first token is at
            ``position`` of its mini-batch. None for no rotation.

    A layer with one direction can continue after any token, from the state of an earlier call::

        first, state = layer(x[:, :n], return_state=True)
        rest = layer(x[:, n:], state)         # both: layer(x)

    Raises:
        ValueError: D is not a multiple of H, or an argument is out of its range.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        learner: Callable[..., nn.Module],
        *,
        bidirectional: bool = False,
        share_qk: bool = False,
        conv_kernel_size: int = 0,
        gate: bool = False,
        merge: type[GatedNorm] = GatedNorm,
        base_learning_rate: float = 1.0,
        learned_rates: bool = True,
        rotary: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise ValueError(f"dim must be a multiple of num_heads, got {dim} and {num_heads}")
        directions = 2 if bidirectional else 1
        self.directions = directions
        self.heads = directions * num_heads
        self.head_dim = dim // num_heads
        self.base_learning_rate = base_learning_rate
        inner = directions * dim
        # One matrix product computes all wide projections of x. The rates have their own: their few
        # columns would break the product's alignment, which costs more.
        self.widths = {
            "k": inner,
            "q": 0 if share_qk else inner,
            "v": inner,
            "gate": dim if gate else 0,
        }
        self.in_proj = nn.Linear(dim, sum(self.widths.values()), bias=False)
        self.rate_proj = nn.Linear(dim, self.heads) if learned_rates else None
        if conv_kernel_size < 0:
            raise ValueError(f"conv_kernel_size must be at least 0, got {conv_kernel_size}")
        self.has_conv = conv_kernel_size > 0
        if self.has_conv:
            self.conv_q, self.conv_k = (
                DirectionalConv1d(inner, conv_kernel_size, reverse_channels=inner - dim)
                for _ in range(2)
            )
        else:
            self.conv_q, self.conv_k = nn.Identity(), nn.Identity()
        self.rotary = rotary
        self.learner = learner(num_heads, self.head_dim, directions=directions)
        self.merge = merge(dim, directions)
        self.out_proj = nn.Linear(dim, dim, bias=False)
        for projection in (self.in_proj, self.rate_proj, self.out_proj):
            if projection is not None:
                nn.init.trunc_normal_(projection.weight, std=0.02)
        if self.rate_proj is not None:
            nn.init.zeros_(self.rate_proj.bias)

    def views(
        self,
        x: Tensor,
        state: TTTLayerState | None = None,
        return_state: bool = False,
        lengths: Tensor | None = None,
    ) -> Views | tuple[Views, tuple[Tensor | None, Tensor | None]]:
        """q, k, v [B, T, heads, d], eta [B, T, heads] and the gate's logits [B, T, D] or None.

        With ``return_state`` also the states of both convolutions.
        """
        k, q, v, gate = self.in_proj(x).split_with_sizes(list(self.widths.values()), dim=-1)
        if not self.widths["q"]:
            q = k
        taps = None, None
        if not self.has_conv or (state is None and not return_state):
            own = {} if lengths is None or not self.has_conv else {"lengths": lengths}
            q, k = self.conv_q(q, **own), self.conv_k(k, **own)
        else:
            before = (None, None) if state is None else (state.conv_q, state.conv_k)
            q, taps_q = self.conv_q(q, before[0], True, lengths)
            k, taps_k = self.conv_k(k, before[1], True, lengths)
            taps = taps_q, taps_k
        q, k, v = (view.unflatten(-1, (self.heads, self.head_dim)) for view in (q, k, v))
        if self.rotary is not None:
            position = 0 if state is None else state.learner.position
            q, k = self.rotary(q, position), self.rotary(k, position)
        # Rates are at least float32, as the sums of gradients that they multiply.
        if self.rate_proj is None:
            ones = _at_least_float32(torch.ones_like(x[..., :1]))
            eta = self._scaled(ones).repeat(1, 1, self.heads)
        else:
            eta = self.rates(_at_least_float32(self.rate_proj(x)))
        views = q, k, v, eta, gate if self.widths["gate"] else None
        return (views, taps) if return_state else views

    def inner_problem(self, x: Tensor) -> dict[str, Tensor | int | float]:
        """The arguments of the inner learner's op for tokens x [B, T, D], of an `InnerLearner`."""
        q, k, v, eta, _ = self.views(x)
        return self.learner.problem(q, k, v, eta)

    def rates(self, logits: Tensor) -> Tensor:
        """η = η_base σ(logits) / d: TTT, Sec. 2.7, and the 1/d of the released code."""
        return self._scaled(torch.sigmoid(logits))

    def _scaled(self, rates: Tensor) -> Tensor:
        return rates * (self.base_learning_rate / self.head_dim)

    def forward(
        self,
        x: Tensor,
        state: TTTLayerState | None = None,
        return_state: bool = False,
        lengths: Tensor | None = None,
        *,
        attn_mask: None = None,
        is_causal: bool = False,
    ) -> Tensor | tuple[Tensor, TTTLayerState]:
        """Mix tokens x [B, T, D], the next ones of a sequence where its state is given.

        With ``lengths`` [B] each sequence has its own number of them: what is behind is padding,
        which is not read, and whose outputs are 0.

        Blocks of timm call their attention with ``attn_mask`` and ``is_causal``. The mask must be
        None. ``is_causal=True`` requires a layer of one direction, which is always causal.

        Raises:
            TypeError: the state is not a :class:`TTTLayerState` of tensors of accepted dtypes, the
                lengths are not whole numbers, or the learner takes none.
            ValueError: a state is given or asked for with two directions, the state or the lengths
                do not fit, there is a mask, or two directions are to be causal.
        """
        self._check_attention(attn_mask, is_causal)
        # Also ahead of the projections: a gradient of 0 times NaN would reach their weights.
        padding = padding_of("TTTLayer", lengths, x)
        x = fill_padding(x, padding)
        if state is None and not return_state:
            own = {} if lengths is None else {"lengths": lengths}  # which not every learner takes
            q, k, v, eta, gate = self.views(x, **own)
            z = self.learner(q, k, v, eta, **own).flatten(2)  # [B, T, directions · D]
            return fill_padding(self.out_proj(self.merge(z, gate)), padding)
        if self.directions > 1:
            raise ValueError(
                "a bidirectional layer has no state to continue from: its second direction begins"
                " at the last token. Give it the whole sequence, or set bidirectional=False"
            )
        if state is not None and not isinstance(state, TTTLayerState):
            raise TypeError(f"state must be a TTTLayerState, got {type(state).__name__}")
        if state is not None and state.learner is None:
            raise ValueError("state.learner is missing: the state cannot go on")
        if state is not None and not isinstance(state.learner, (LinearState, MLPState)):
            kind = type(state.learner).__name__
            raise TypeError(f"state.learner must be a LinearState or an MLPState, got {kind}")
        if state is not None and self.has_conv == (state.conv_q is None or state.conv_k is None):
            raise ValueError(
                f"the state must have conv_q and conv_k {'' if self.has_conv else 'None '}"
                f"of a layer {'with' if self.has_conv else 'without'} convolutions, got conv_q "
                f"{_shape(state.conv_q)} and conv_k {_shape(state.conv_k)}"
            )
        (q, k, v, eta, gate), taps = self.views(x, state, True, lengths)
        learner = None if state is None else state.learner
        z, learner = self.learner(q, k, v, eta, learner, True, lengths)
        o = fill_padding(self.out_proj(self.merge(z.flatten(2), gate)), padding)
        return (o, TTTLayerState(learner, *taps)) if return_state else o

    def _check_attention(self, attn_mask: None = None, is_causal: bool = False) -> None:
        if attn_mask is not None:
            raise ValueError(
                "attn_mask must be None: a TTT layer has no attention to mask. The number of tokens"
                " of padded sequences is given by lengths [B]"
            )
        if is_causal and self.directions > 1:
            raise ValueError("is_causal=True requires a layer with bidirectional=False")


class OpTTTLayer(TTTLayer):
    """The base of the layers whose inner learner calls an op; for arguments see :class:`TTTLinear`.

    ``base_learning_rate`` is the class's own by default.
    """

    learner: InnerLearner
    learner_class: ClassVar[type[InnerLearner]]
    default_rate: ClassVar[float]

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
        state_std: float = 0.02,
        inner_norm: bool = True,
        base_learning_rate: float | None = None,
        learned_rates: bool = True,
        merge: type[GatedNorm] = GatedNorm,
        rotary: nn.Module | None = None,
    ) -> None:
        learner = partial(
            self.learner_class,
            mini_batch_size=mini_batch_size,
            learnable_states=learnable_states,
            state_std=state_std,
            inner_norm=inner_norm,
            scaled=learned_rates,
        )
        super().__init__(
            dim,
            num_heads,
            learner,
            bidirectional=bidirectional,
            share_qk=share_qk,
            conv_kernel_size=conv_kernel_size,
            gate=gate,
            merge=merge,
            base_learning_rate=(
                self.default_rate if base_learning_rate is None else base_learning_rate
            ),
            learned_rates=learned_rates,
            rotary=rotary,
        )
        self.add_buffers()

    def add_buffers(self) -> None:
        """Register the buffers that a class has beside the layer's parts."""


def _shape(x: Tensor | None) -> list[int] | None:
    return None if x is None else list(x.shape)


@torch.fx.wrap
def _at_least_float32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
