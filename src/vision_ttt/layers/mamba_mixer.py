"""Mamba in one direction, which goes on at any token."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_ttt.layers.mamba_parameters import MambaParameters
from vision_ttt.ops import selective_scan, states
from vision_ttt.ops.padding import fill_padding, padding_of


class MambaState(NamedTuple):
    """What a :class:`Mamba` needs to go on after any token.

    ``conv`` are the last tokens that its convolution has seen [B, k - 1, E], ``scan`` is h after
    the last token [B, E, N], in float32 at least.
    """

    conv: Tensor
    scan: Tensor

    detach = states.detach
    select = states.select
    tensors = states.tensors
    to = states.to


class Mamba(MambaParameters):
    """Sequence layer of one selective scan: [B, T, D] → [B, T, D].

    Mamba (Gu and Dao 2023, Sec. 3.4 and Algorithm 2). It computes what one direction of
    :class:`vision_ttt.layers.BidirectionalMamba` does, whose arguments, initialisation and errors
    it has: the output is Linear_o((C_t · h_t + D_skip u_t) SiLU(z_t)).

    The layer can continue after any token, from the state of an earlier call::

        first, state = layer(x[:, :n], return_state=True)
        rest = layer(x[:, n:], state)         # both: layer(x)

    Example:
        >>> mixer = Mamba(192)
        >>> mixer(torch.randn(2, 196, 192)).shape
        torch.Size([2, 196, 192])
    """

    directions = 1

    def forward(
        self,
        x: Tensor,
        state: MambaState | None = None,
        return_state: bool = False,
        lengths: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, MambaState]:
        """Mix tokens x [B, T, D], the next ones of a sequence where its state is given.

        With ``lengths`` [B] each sequence has its own number of them: what is behind is padding,
        which is not read, and whose outputs are 0.

        Raises:
            TypeError: the state is not a :class:`MambaState` of tensors of accepted dtypes, or the
                lengths are not whole numbers.
            ValueError: the state or the lengths do not fit.
        """
        if state is not None and not isinstance(state, MambaState):
            raise TypeError(f"state must be a MambaState, got {type(state).__name__}")
        for name, part in () if state is None else state._asdict().items():
            if part is None:
                raise ValueError(f"state.{name} is missing: the state cannot go on")
        taps, scanned = (None, None) if state is None else state
        padding = padding_of("Mamba", lengths, x)
        x = fill_padding(x, padding)  # a gradient of 0 times NaN would reach the weights
        x, z = self.in_proj(x).chunk(2, dim=-1)  # [B, T, E]
        own = {} if lengths is None else {"lengths": lengths}
        if state is None and not return_state:
            x = self.conv(x, **own)
        else:
            x, taps = self.conv(x, taps, return_state=True, **own)
        u = F.silu(x)
        r, b, c = F.linear(u, self.x_proj).split([self.rank, self.state, self.state], dim=-1)
        y, scanned = selective_scan(
            u,
            F.linear(r, self.dt_proj),
            -torch.exp(self.A_log),
            b,
            c,
            self.D,
            z,
            delta_bias=self.dt_bias,
            delta_softplus=True,
            initial_state=scanned,
            lengths=lengths,
            return_state=True,
        )
        o = fill_padding(self.out_proj(y), padding)
        return (o, MambaState(taps, scanned)) if return_state else o
