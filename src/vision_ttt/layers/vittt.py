"""The Vittt block: dual-dataset TTT with Conv2d preprocessing, then a SwiGLU MLP."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from vision_ttt.layers.depthwise_conv2d import DepthwiseConv2d
from vision_ttt.layers.fusable import Fusable
from vision_ttt.layers.grid import check_grid
from vision_ttt.layers.swiglu import SwiGLU
from vision_ttt.layers.ttt_linear import TTTLinear
from vision_ttt.ops import normed_swiglu_mlp, residual_conv2d_norm

torch.fx.wrap("check_grid")


class VitttMixer(Fusable):
    """Mix image tokens [B, T, D] on a grid (h, w) in linear time: → [B, T, D].

    Vision-TTT, Algorithm 1, with its residual::

        y ← y + DWConv3×3(y)
        y ← y + TTT(LN(y))

    The algorithm's last line adds LN(y) where Eq. 9 adds y; this is Eq. 9, the pre-norm residual.

    Args:
        dim: D.
        num_heads: H per direction of the published sequence layer, :meth:`published_ttt`.
        ttt: another sequence layer [B, T, D] → [B, T, D], given instead of num_heads.
        conv2d: convolve the tokens on their grid first; all rows of Table 3 but the last do not.
        drop_path: applied to the TTT branch, e.g. ``timm.layers.DropPath``.
        fused: convolve, add and normalise in one op,
            :func:`vision_ttt.ops.residual_conv2d_norm`, which keeps only its input for the backward
            pass. ``conv2d`` and ``norm`` then only hold their parameters, see
            :class:`vision_ttt.layers.fusable.Fusable`: hooks on them do not run, and replacing one
            is an error until ``fused`` is set to False. Without ``conv2d`` there is no such op.

    Raises:
        ValueError: not exactly one of num_heads and ttt is given.
    """

    fused_parts = ("conv2d", "norm")

    def __init__(
        self,
        dim: int,
        num_heads: int | None = None,
        *,
        ttt: nn.Module | None = None,
        conv2d: bool = True,
        drop_path: nn.Module | None = None,
        fused: bool = False,
    ) -> None:
        super().__init__()
        if (num_heads is None) == (ttt is None):
            raise ValueError(f"give num_heads or ttt, one of them; got num_heads={num_heads}")
        self.conv2d = DepthwiseConv2d(dim) if conv2d else None
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.ttt = self.published_ttt(dim, num_heads) if ttt is None else ttt
        self.drop_path = nn.Identity() if drop_path is None else drop_path
        if fused and conv2d:
            self.switch_on()

    @staticmethod
    def published_ttt(dim: int, num_heads: int) -> TTTLinear:
        """Both directions, shared q and k with Conv1d, a gate, mini-batches of 16 tokens."""
        return TTTLinear(
            dim, num_heads, bidirectional=True, share_qk=True, conv_kernel_size=4, gate=True
        )

    def forward(self, y: Tensor, grid: tuple[int, int], extra: Sequence[int] = ()) -> Tensor:
        """Mix tokens y [B, T, D]; ``extra`` are the positions in T of tokens outside the grid.

        With such tokens the parts are called also where ``fused`` is set.

        Raises:
            ValueError: T is not h · w + len(extra).
        """
        conv2d, norm = self.conv2d, self.norm
        if self.fused and conv2d is not None and not extra:
            check_grid(y.shape[1], grid)
            y, normed = residual_conv2d_norm(
                y, conv2d.weight, (norm.weight, norm.bias), grid, eps=norm.eps
            )
            return y + self.drop_path(self.ttt(normed))
        if conv2d is not None:
            y = y + conv2d(y, grid, extra)
        return y + self.drop_path(self.ttt(norm(y)))


class VitttBlock(Fusable):
    """One block of Vision-TTT (Eq. 9): y ← mixer(y), then y ← y + SwiGLU(LN(y)), without biases.

    Args:
        mixer: [B, T, D], (h, w), extra → [B, T, D] with its own residual, e.g. :class:`VitttMixer`.
        dim: D.
        mlp_hidden: hidden width of the SwiGLU.
        drop_path: applied to the MLP branch.
        fused_mlp: run the MLP branch as one op, :func:`vision_ttt.ops.normed_swiglu_mlp`, which
            keeps its input and at most three quarters of its hidden layer for the backward pass
            and computes the rest again. Without a ``drop_path`` the op adds the residual too.
            ``norm`` and ``mlp`` then only hold their parameters, see
            :class:`vision_ttt.layers.fusable.Fusable`: hooks on them do not run, and replacing one,
            or ``drop_path``, is an error until ``fused`` is set to False.
    """

    fused_parts = ("norm", "mlp", "drop_path")

    def __init__(
        self,
        mixer: nn.Module,
        dim: int,
        mlp_hidden: int,
        *,
        drop_path: nn.Module | None = None,
        fused_mlp: bool = False,
    ) -> None:
        super().__init__()
        self.mixer = mixer
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = SwiGLU(dim, mlp_hidden, fused=fused_mlp)
        self.drop_path = nn.Identity() if drop_path is None else drop_path
        self._drops = drop_path is not None
        if fused_mlp:
            self.switch_on()

    def forward(self, y: Tensor, grid: tuple[int, int], extra: Sequence[int] = ()) -> Tensor:
        y = self.mixer(y, grid, extra)  # [B, T, D]
        norm, mlp = self.norm, self.mlp
        # The block's op stands for the MLP's: whoever switches that off calls the MLP's parts.
        if not (self.fused and mlp.fused):
            return y + self.drop_path(mlp(norm(y)))
        branch = partial(
            normed_swiglu_mlp,
            *(y, (norm.weight, norm.bias), mlp.fc1.weight, mlp.fc2.weight),
            eps=norm.eps,
        )
        return y + self.drop_path(branch(residual=False)) if self._drops else branch()
