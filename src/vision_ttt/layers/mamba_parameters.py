"""What Mamba layers of one and of two directions share: sizes, parameters, initialisation."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import nn

from vision_ttt.layers.directional_conv1d import DirectionalConv1d


class MambaParameters(nn.Module):
    """The base of Mamba layers; for arguments see :class:`vision_ttt.layers.BidirectionalMamba`.

    Of the parameters' first axis, or of its halves, the first is the forward direction.
    """

    directions: ClassVar[int]

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
        sizes = {"dim": dim, "state": state, "expand": expand}
        sizes |= {"conv_kernel_size": conv_kernel_size, "dt_rank": rank}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if not 0 < dt_range[0] <= dt_range[1] < math.inf:
            raise ValueError(f"dt_range must be two ascending numbers above 0, got {dt_range}")
        inner = expand * dim
        both = self.directions * inner
        each = () if self.directions == 1 else (self.directions,)
        self.inner, self.state, self.rank = inner, state, rank
        self.dt_range = dt_range
        self.in_proj = nn.Linear(dim, 2 * inner, bias=False)
        self.conv = DirectionalConv1d(both, conv_kernel_size, reverse_channels=both - inner)
        self.x_proj = nn.Parameter(torch.empty(*each, rank + 2 * state, inner))
        self.dt_proj = nn.Parameter(torch.empty(*each, inner, rank))
        self.dt_bias = nn.Parameter(torch.empty(both))
        self.A_log = nn.Parameter(torch.empty(both, state))
        self.D = nn.Parameter(torch.empty(both))
        self.out_proj = nn.Linear(inner, dim, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise what the modules inside do not: the parameters around the scan."""
        nn.init.uniform_(self.x_proj, -(self.inner**-0.5), self.inner**-0.5)
        nn.init.uniform_(self.dt_proj, -(self.rank**-0.5), self.rank**-0.5)
        smallest, largest = self.dt_range
        dt = self.dt_bias.uniform_(math.log(smallest), math.log(largest)).exp()
        self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # softplus(dt_bias) = dt
        rates = self.A_log
        each = torch.arange(1, self.state + 1, dtype=rates.dtype, device=rates.device)
        rates.copy_(each.log().expand_as(rates))
        self.D.fill_(1)

    def no_weight_decay(self) -> set[str]:
        """The parameters of the recurrence itself."""
        return {"A_log", "D", "dt_bias"}

    def extra_repr(self) -> str:
        return f"inner={self.inner}, state={self.state}, rank={self.rank}"
