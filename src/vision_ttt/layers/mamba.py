"""Mamba in both directions, and its block: the parts of Vim and Mamba-Reg."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_ttt.layers.mamba_parameters import MambaParameters
from vision_ttt.ops import selective_scan
from vision_ttt.ops.padding import fill_padding, padding_of


class BidirectionalMamba(MambaParameters):
    """Sequence layer of two selective scans, one in each direction: [B, T, D] → [B, T, D].

    Vim, Algorithm 1, with x the input::

        x, z    = Linear(x)                          E = expand · D wide each, no bias
        y       = ½ (scan_forward(x) + scan_backward(x)) ⊙ SiLU(z)
        out     = Linear_o(y)                        no bias

    and per direction, with parameters of its own::

        u       = SiLU(Conv1d(x))                    depth-wise, causal in scan direction
        r, B, C = Linear(u)                          R, N and N wide, no bias
        δ       = softplus(Linear(r))                a step size per token and channel
        h_t     = exp(δ_t A) h_{t-1} + δ_t B_t u_t   a state of N numbers per channel
        y_t     = C_t · h_t + D_skip u_t

    Both directions are channels of one convolution and of one
    :func:`vision_ttt.ops.selective_scan`. Under autocast A, D_skip, the bias of δ and the states
    are float32.

    Example:
        >>> mixer = BidirectionalMamba(192)
        >>> mixer(torch.randn(2, 196, 192)).shape
        torch.Size([2, 196, 192])

    Args:
        dim: D.
        state: N.
        expand: E over D.
        conv_kernel_size: taps of the Conv1d.
        dt_rank: R; by default ⌈D / 16⌉.
        dt_range: smallest and largest δ of a fresh layer where r is zero.

    Initialisation, the releases' for one direction in both: A = -(1, …, N), D_skip = 1, the bias of
    δ such that δ is log-uniform in ``dt_range``, its weights uniform in ±R^-½, other projections
    and the convolution PyTorch's default. (The releases start the backward direction's bias of δ at
    zero.)

    Raises:
        ValueError: an argument is out of its range.
    """

    directions = 2

    def forward(
        self,
        x: Tensor,
        state: object = None,
        return_state: bool = False,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Mix tokens x [B, T, D].

        With ``lengths`` [B] each sequence has its own number of tokens: what is behind is padding,
        which is not read, and whose outputs are 0.

        Raises:
            TypeError: the lengths are not whole numbers.
            ValueError: a state is given or asked for, or the lengths do not fit.
        """
        if state is not None or return_state:
            raise ValueError(
                "a bidirectional layer has no state to continue from: its second direction begins"
                " at the last token. Give it the whole sequence, or use Mamba, with one direction"
            )
        padding = padding_of("BidirectionalMamba", lengths, x)
        x = fill_padding(x, padding)  # a gradient of 0 times NaN would reach the weights
        x, z = self.in_proj(x).chunk(2, dim=-1)  # [B, T, E]
        own = {} if lengths is None else {"lengths": lengths}
        u = F.silu(self.conv(torch.cat([x, x], dim=-1), **own))  # [B, T, 2 E]
        # B images, t tokens, g directions, E channels; o of r, B and C.
        both = u.unflatten(-1, (2, self.inner))
        projected = torch.einsum("btge,goe->btgo", both, self.x_proj)
        r, b, c = projected.split_with_sizes([self.rank, self.state, self.state], dim=-1)
        delta = torch.einsum("btgr,ger->btge", r, self.dt_proj).flatten(2)  # [B, T, 2 E]
        y = selective_scan(
            u,
            delta,
            -torch.exp(self.A_log),
            b,
            c,
            self.D,
            delta_bias=self.dt_bias,
            delta_softplus=True,
            reverse_channels=self.inner,
            lengths=lengths,
        )
        forward, backward = y.chunk(2, dim=-1)
        return fill_padding(self.out_proj(0.5 * (forward + backward) * F.silu(z)), padding)


class MambaBlock(nn.Module):
    """The block of Vim and Mamba-Reg on tokens x [B, T, D]: x ← x + mixer(RMSNorm(x)).

    Released code delays the sum into the next block's norm, which computes the same. The sum x is
    in the dtype of the tokens that come in: where these are float32 it remains so under autocast,
    as in the releases (``residual_in_fp32``).

    Args:
        dim: D.
        mixer: [B, T, D] → [B, T, D]; by default :class:`BidirectionalMamba`.
        drop_path: applied to the mixer's output, e.g. ``timm.layers.DropPath``.
        norm_eps: of the RMSNorm.
    """

    def __init__(
        self,
        dim: int,
        *,
        mixer: nn.Module | None = None,
        drop_path: nn.Module | None = None,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim, eps=norm_eps)
        self.mixer = BidirectionalMamba(dim) if mixer is None else mixer
        self.drop_path = nn.Identity() if drop_path is None else drop_path

    def forward(
        self, x: Tensor, grid: tuple[int, int] | None = None, extra: Sequence[int] = ()
    ) -> Tensor:
        """Run the block; a sequence needs neither its grid nor the positions of extra tokens."""
        return x + self.drop_path(self.mixer(self.norm(x)))
