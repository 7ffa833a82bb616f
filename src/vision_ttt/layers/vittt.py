"""The Vittt block: dual-dataset TTT with Conv2d preprocessing, then a SwiGLU MLP."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from vision_ttt.layers.depthwise_conv2d import DepthwiseConv2d
from vision_ttt.layers.swiglu import SwiGLU
from vision_ttt.layers.ttt_linear import TTTLinear


class VitttMixer(nn.Module):
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

    Raises:
        ValueError: not exactly one of num_heads and ttt is given.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int | None = None,
        *,
        ttt: nn.Module | None = None,
        conv2d: bool = True,
        drop_path: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if (num_heads is None) == (ttt is None):
            raise ValueError(f"give num_heads or ttt, one of them; got num_heads={num_heads}")
        self.conv2d = DepthwiseConv2d(dim) if conv2d else None
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.ttt = self.published_ttt(dim, num_heads) if ttt is None else ttt
        self.drop_path = nn.Identity() if drop_path is None else drop_path

    @staticmethod
    def published_ttt(dim: int, num_heads: int) -> TTTLinear:
        """Both directions, shared q and k with Conv1d, a gate, mini-batches of 16 tokens."""
        return TTTLinear(
            dim, num_heads, bidirectional=True, share_qk=True, conv_kernel_size=4, gate=True
        )

    def forward(self, y: Tensor, grid: tuple[int, int], extra: Sequence[int] = ()) -> Tensor:
        """Mix tokens y [B, T, D]; ``extra`` are the positions in T of tokens outside the grid.

        Raises:
            ValueError: T is not h · w + len(extra).
        """
        if self.conv2d is not None:
            y = y + self.conv2d(y, grid, extra)
        return y + self.drop_path(self.ttt(self.norm(y)))


class VitttBlock(nn.Module):
    """One block of Vision-TTT (Eq. 9): y ← mixer(y), then y ← y + SwiGLU(LN(y)), without biases.

    Args:
        mixer: [B, T, D], (h, w), extra → [B, T, D] with its own residual, e.g. :class:`VitttMixer`.
        dim: D.
        mlp_hidden: hidden width of the SwiGLU.
        drop_path: applied to the MLP branch.
    """

    def __init__(
        self, mixer: nn.Module, dim: int, mlp_hidden: int, *, drop_path: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.mixer = mixer
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = SwiGLU(dim, mlp_hidden)
        self.drop_path = nn.Identity() if drop_path is None else drop_path

    def forward(self, y: Tensor, grid: tuple[int, int], extra: Sequence[int] = ()) -> Tensor:
        y = self.mixer(y, grid, extra)  # [B, T, D]
        return y + self.drop_path(self.mlp(self.norm(y)))
