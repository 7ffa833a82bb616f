"""Depth-wise convolution along the sequence, causal in each channel's scan direction."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vision_ttt.ops import directional_conv1d
from vision_ttt.ops._contract import Contract, Whole
from vision_ttt.ops.padding import fill_padding, padding_of
from vision_ttt.ops.states import take

_STATE_CONTRACT = Contract(
    "DirectionalConv1d",
    {"x": "B T C", "state": "B past C"},
    {"past": Whole(0)},
    may_be_0=("B", "T", "past"),
)


class DirectionalConv1d(nn.Conv1d):
    """Depth-wise causal Conv1d with bias on tokens [B, T, C] → [B, T, C].

    The output of a token depends on itself and on the ``kernel_size`` - 1 tokens before it in scan
    order. The last ``reverse_channels`` channels scan from T to 1; their kernels are applied
    mirrored, and the sequence is not flipped.

    Args:
        channels: C.
        kernel_size: taps.
        reverse_channels: how many of the last channels scan from T to 1.

    Raises:
        ValueError: reverse_channels is not in 0 … C.
    """

    def __init__(self, channels: int, kernel_size: int = 4, reverse_channels: int = 0) -> None:
        if not 0 <= reverse_channels <= channels:
            raise ValueError(f"reverse_channels must be in 0 … {channels}, got {reverse_channels}")
        super().__init__(channels, channels, kernel_size, groups=channels)
        self.reverse_channels = reverse_channels

    def forward(
        self,
        x: Tensor,
        state: Tensor | None = None,
        return_state: bool = False,
        lengths: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Convolve tokens, the next ones of a sequence where a state is given.

        Args:
            x: tokens [B, T, C].
            state: the ``kernel_size`` - 1 tokens before them [B, k - 1, C], as an earlier call has
                returned them; None at the beginning, before which all tokens are 0.
            return_state: return (output, state) with the last k - 1 tokens.
            lengths: tokens of each sequence [B]; what is behind them is padding, which is not read
                and whose outputs are 0.

        Raises:
            TypeError: the state or lengths are of another type or dtype.
            ValueError: the state or lengths have another shape or are on another device, the
                lengths are not in 0 … T, or a state is given or asked for and channels scan from T
                to 1, whose first token is the last one of the sequence.
        """
        padding = padding_of("DirectionalConv1d", lengths, x)
        x = fill_padding(x, padding)
        if state is None and not return_state:
            o = directional_conv1d(x, self.weight, self.bias, self.reverse_channels)
            return fill_padding(o, padding)
        if self.reverse_channels:
            raise ValueError(
                f"a convolution with reverse_channels={self.reverse_channels} has no state: these"
                " channels begin at the last token; give it the whole sequence"
            )
        taps = self.kernel_size[0] - 1
        if state is None:
            state = x.new_zeros(len(x), taps, x.shape[-1])
        _STATE_CONTRACT.check((x, state, taps))
        seen = torch.cat([state.to(x.dtype), x], dim=1)
        o = fill_padding(directional_conv1d(seen, self.weight, self.bias, 0)[:, taps:], padding)
        if not return_state:
            return o
        if lengths is None:
            # A view would keep all of the tokens in memory for as long as the state is kept.
            return o, seen[:, x.shape[1] :].clone()
        return o, take(seen, lengths.unsqueeze(1) + torch.arange(taps, device=x.device))
