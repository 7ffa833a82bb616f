"""Mamba in one direction, which goes on at any token."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_ttt.layers.directional_conv1d import DirectionalConv1d
from vision_ttt.layers.mamba_parameters import check_mamba_sizes, reset_scan_parameters
from vision_ttt.ops import selective_scan, states


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


class Mamba(nn.Module):
    """Sequence layer of one selective scan: [B, T, D] → [B, T, D].

    Mamba (Gu and Dao 2023, Sec. 3.4 and Algorithm 2), with x the input::

        x, z    = Linear(x)                          E = expand · D wide each, no bias
        u       = SiLU(Conv1d(x))                    depth-wise, causal
        r, B, C = Linear(u)                          R, N and N wide, no bias
        δ       = softplus(Linear(r))                a step size per token and channel
        h_t     = exp(δ_t A) h_{t-1} + δ_t B_t u_t   a state of N numbers per channel
        y_t     = (C_t · h_t + D_skip u_t) SiLU(z_t)
        out     = Linear_o(y)                        no bias

    The parameters are those of :class:`vision_ttt.layers.BidirectionalMamba`, of its first
    direction where that has two. Under autocast A, D_skip, the bias of δ and the state are float32.

    The layer goes on where a call has ended, after any token::

        first, state = layer(x[:, :n], return_state=True)
        rest = layer(x[:, n:], state)         # both: layer(x)

    Example:
        >>> mixer = Mamba(192)
        >>> mixer(torch.randn(2, 196, 192)).shape
        torch.Size([2, 196, 192])

    Args:
        dim: D.
        state: N.
        expand: E over D.
        conv_kernel_size: k, the taps of the Conv1d.
        dt_rank: R; by default ⌈D / 16⌉.
        dt_range: smallest and largest δ of a fresh layer where r is zero.

    Initialisation: as :class:`vision_ttt.layers.BidirectionalMamba`.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        dim: int,
        state: int = 16,
        expand: int = 2,
        conv_kernel_size: int = 4,
        *,
        dt_rank: int | None = None,
        dt_range: tuple[float, float] = (1e-3, 0.1),
    ) -> None:
        super().__init__()
        rank = math.ceil(dim / 16) if dt_rank is None else dt_rank
        check_mamba_sizes(dt_range, dim, state, expand, conv_kernel_size, rank)
        inner = expand * dim
        self.inner, self.state, self.rank = inner, state, rank
        self.dt_range = dt_range
        self.in_proj = nn.Linear(dim, 2 * inner, bias=False)
        self.conv = DirectionalConv1d(inner, conv_kernel_size)
        self.x_proj = nn.Parameter(torch.empty(rank + 2 * state, inner))
        self.dt_proj = nn.Parameter(torch.empty(inner, rank))
        self.dt_bias = nn.Parameter(torch.empty(inner))
        self.A_log = nn.Parameter(torch.empty(inner, state))
        self.D = nn.Parameter(torch.empty(inner))
        self.out_proj = nn.Linear(inner, dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise what the modules inside do not."""
        reset_scan_parameters(self)

    def no_weight_decay(self) -> set[str]:
        """The parameters of the recurrence itself."""
        return {"A_log", "D", "dt_bias"}

    def forward(
        self, x: Tensor, state: MambaState | None = None, return_state: bool = False
    ) -> Tensor | tuple[Tensor, MambaState]:
        """Mix tokens x [B, T, D], the next ones of a sequence where its state is given.

        Raises:
            TypeError: the state is not a :class:`MambaState` of tensors of accepted dtypes.
            ValueError: the state does not fit.
        """
        if state is not None and not isinstance(state, MambaState):
            raise TypeError(f"state must be a MambaState, got {type(state).__name__}")
        for name, part in () if state is None else state._asdict().items():
            if part is None:
                raise ValueError(f"state.{name} is missing: the state cannot go on")
        taps, scanned = (None, None) if state is None else state
        x, z = self.in_proj(x).chunk(2, dim=-1)  # [B, T, E]
        if state is None and not return_state:
            x = self.conv(x)
        else:
            x, taps = self.conv(x, taps, return_state=True)
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
            return_state=True,
        )
        o = self.out_proj(y)
        return (o, MambaState(taps, scanned)) if return_state else o

    def extra_repr(self) -> str:
        return f"inner={self.inner}, state={self.state}, rank={self.rank}"
