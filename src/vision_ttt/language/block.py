"""A block of a TTT language model, and its state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from vision_ttt.language.configuration import TTTConfig
from vision_ttt.language.packing import Packing
from vision_ttt.layers import (
    TTTMLP,
    DirectionalConv1d,
    LinearAttention,
    MiniBatchRotary,
    SwiGLU,
    TanhGatedNorm,
    TTTLayer,
    TTTLayerState,
    TTTLinear,
)
from vision_ttt.ops import states
from vision_ttt.ops.padding import fill_padding, padding_of


def _ttt_layer(config: TTTConfig) -> Callable[..., TTTLayer]:
    """The sequence modelling layer, but for (dim, heads) and what is the same of all kinds."""
    size = config.mini_batch_size
    if config.ttt_layer_type in ("linear", "mlp"):
        return partial(
            TTTLinear if config.ttt_layer_type == "linear" else TTTMLP,
            mini_batch_size=size,
            inner_norm=config.inner_norm,
            **({} if config.learnable_w0 else {"learnable_states": 0, "state_std": 0.0}),
        )
    normalised = config.ttt_layer_type.startswith("normalised")
    return partial(TTTLayer, learner=partial(LinearAttention, normalised=normalised, period=size))


class TTTBlockState(NamedTuple):
    """What a :class:`TTTBlock` needs to go on after any token.

    ``ttt`` is its TTT layer's, ``conv`` the last tokens that its convolution has seen
    [B, k - 1, D], None without one.
    """

    ttt: TTTLayerState
    conv: Tensor | None = None

    detach = states.detach
    select = states.select
    tensors = states.tensors
    to = states.to


class TTTBlock(GradientCheckpointingLayer):
    """x + Conv(RMSNorm(x)), then x + TTT(RMSNorm(x)), then x + SwiGLU(RMSNorm(x)): [B, T, D].

    The first part is the Mamba backbone's, with ``config.pre_conv``; its convolution is depth-wise
    and causal, without an activation (TTT, Fig. 16). Queries and keys are rotated by their place in
    their mini-batch; with ``config.share_qk`` each is convolved before.
    """

    def __init__(self, config: TTTConfig) -> None:
        super().__init__()
        dim, heads = config.hidden_size, config.num_attention_heads
        norm = partial(nn.RMSNorm, dim, eps=config.rms_norm_eps)
        self.has_conv = config.pre_conv
        if config.pre_conv:
            self.conv_norm = norm()
            self.conv = DirectionalConv1d(dim, config.conv_kernel)
        self.seq_norm = norm()
        self.ttt = _ttt_layer(config)(
            dim,
            heads,
            share_qk=config.share_qk,
            conv_kernel_size=config.conv_kernel if config.share_qk else 0,
            gate=config.use_gate,
            merge=TanhGatedNorm,
            base_learning_rate=config.ttt_base_lr,
            learned_rates=config.learnable_eta,
            rotary=MiniBatchRotary(dim // heads, config.mini_batch_size, config.rope_theta),
        )
        self.ffn_norm = norm()
        self.mlp = SwiGLU(dim, config.intermediate_size)

    def forward(
        self,
        x: Tensor,
        state: TTTBlockState | None = None,
        return_state: bool = False,
        lengths: Tensor | None = None,
        packing: Packing | None = None,
    ) -> Tensor | tuple[Tensor, TTTBlockState]:
        """Mix tokens x [B, T, D], the next ones of a sequence where its state is given.

        With ``lengths`` [B] what is behind so many tokens is padding, which is not read, and whose
        outputs are 0. With ``packing`` the rows are several documents, and each is mixed apart.

        Raises:
            TypeError: the state is not a :class:`TTTBlockState` of tensors of accepted dtypes, or
                the lengths are not whole numbers.
            ValueError: the state is another backbone's, or it or the lengths do not fit.
        """
        if packing is not None:
            x = fill_padding(x, padding_of("TTTBlock", lengths, x))
            return packing.run(self._mix, x, return_state)
        return self._mix(x, state, return_state, lengths)

    def _mix(
        self,
        x: Tensor,
        state: TTTBlockState | None,
        return_state: bool,
        lengths: Tensor | None,
    ) -> Tensor | tuple[Tensor, TTTBlockState]:
        """As :meth:`forward`, of rows that are one document each."""
        padding = padding_of("TTTBlock", lengths, x)
        x = fill_padding(x, padding)
        if state is not None and not isinstance(state, TTTBlockState):
            raise TypeError(f"state must be a TTTBlockState, got {type(state).__name__}")
        if state is not None and self.has_conv == (state.conv is None):
            raise ValueError(
                "the state is of a block with another backbone: conv must be "
                f"{'a tensor' if self.has_conv else 'None'}, got "
                f"{None if state.conv is None else list(state.conv.shape)}"
            )
        taps = None
        if self.has_conv:
            before = None if state is None else state.conv
            y = self.conv(self.conv_norm(x), before, return_state, lengths)
            if return_state:
                y, taps = y
            x = x + y
        before = None if state is None else state.ttt
        y = self.ttt(self.seq_norm(x), before, return_state, lengths)
        if return_state:
            y, after = y
        x = x + y
        x = fill_padding(x + self.mlp(self.ffn_norm(x)), padding)
        return (x, TTTBlockState(after, taps)) if return_state else x
