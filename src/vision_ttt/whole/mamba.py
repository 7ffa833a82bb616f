"""The block of Vim and Mamba-Reg in bands."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_ttt.acceleration.packed_mamba import require_supported_parts
from vision_ttt.layers import DirectionalConv1d, MambaBlock
from vision_ttt.layers.mamba_mixer import MambaState
from vision_ttt.ops import selective_scan
from vision_ttt.whole.sweeps import ScanBlock, linear


class BandedMamba(ScanBlock):
    """:class:`vision_ttt.layers.MambaBlock` in bands."""

    kind = MambaBlock
    state_kind = MambaState
    halo = 0
    directions = 2

    def __init__(self, block: MambaBlock, dtype: torch.dtype, *, descending: bool) -> None:
        require_supported_parts(block)
        self.descending = descending
        mixer = block.mixer
        self.width, self.rank, self.state = mixer.inner, mixer.rank, mixer.state
        self.working_width = 10 * mixer.inner + 4 * mixer.in_proj.in_features
        self.norm = copy.deepcopy(block.norm).float().requires_grad_(False)
        inner, gate = mixer.in_proj.weight.chunk(2)
        self.in_proj, self.gate = (linear(weight, None, dtype) for weight in (inner, gate))
        self.out_proj = linear(mixer.out_proj.weight, None, dtype)
        self.low = [linear(weight, None, dtype) for weight in mixer.x_proj]
        self.steps = [linear(weight, None, dtype) for weight in mixer.dt_proj]
        decay = -torch.exp(mixer.A_log.detach().float())
        self.scans = [
            tuple(
                x.detach().float().chunk(2)[each].clone() for x in (decay, mixer.D, mixer.dt_bias)
            )
            for each in range(2)
        ]
        self.convs = [self._conv(mixer.conv, each) for each in range(2)]

    def _conv(self, both: DirectionalConv1d, direction: int) -> DirectionalConv1d:
        """The taps of one direction, which goes on at any token."""
        conv = DirectionalConv1d(self.width, both.kernel_size[0])
        parameters = both.named_parameters()
        conv.load_state_dict({name: x.detach().chunk(2)[direction] for name, x in parameters})
        return conv.eval().requires_grad_(False)

    def scan(
        self, direction: int, x: Tensor, state: MambaState | None
    ) -> tuple[Tensor, MambaState]:
        """y of one direction, before the gate."""
        taps, scanned = (None, None) if state is None else state
        x, taps = self.convs[direction](self.in_proj(x), taps, True)
        u = F.silu(x)
        r, b, c = self.low[direction](u).split([self.rank, self.state, self.state], dim=-1)
        decay, skip, bias = self.scans[direction]
        y, scanned = selective_scan(
            u,
            self.steps[direction](r),
            decay,
            b,
            c,
            skip,
            delta_bias=bias,
            delta_softplus=True,
            initial_state=scanned,
            return_state=True,
        )
        return y, MambaState(taps, scanned)

    def merge(self, y: Tensor, x: Tensor, z: Sequence[Tensor]) -> Tensor:
        """The mean of both directions under the gate, projected."""
        return y + self.out_proj(0.5 * (z[0] + z[1]) * F.silu(self.gate(x)))
