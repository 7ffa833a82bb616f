"""The block of ViT³ and H-ViT³."""

from __future__ import annotations

from torch import Tensor, nn

from vision_ttt.layers.mlp import Mlp
from vision_ttt.layers.residual_conv2d import ResidualConv2d
from vision_ttt.layers.vit3_ttt import ViT3TTT


class ViT3Block(nn.Module):
    """One block of ViT³ on tokens y [B, T, D] of a grid (h, w)::

        y ← y + DWConv3×3(y)       conditional position encoding, with bias
        y ← y + TTT(LN(y))
        y ← y + MLP(LN(y))

    Args:
        dim: D.
        num_heads: H of :class:`vision_ttt.layers.ViT3TTT`.
        mlp: [B, T, D], (h, w) → [B, T, D]; by default :class:`vision_ttt.layers.Mlp`, 4 D wide.
        qkv_bias: see :class:`vision_ttt.layers.ViT3TTT`.
        norm_eps: of the LayerNorms.
        drop_path: applied to the TTT and the MLP branch, e.g. ``timm.layers.DropPath``.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        mlp: nn.Module | None = None,
        qkv_bias: bool = True,
        norm_eps: float = 1e-6,
        drop_path: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.cpe = ResidualConv2d(dim)
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.ttt = ViT3TTT(dim, num_heads, qkv_bias=qkv_bias)
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = Mlp(dim, 4 * dim) if mlp is None else mlp
        self.drop_path = nn.Identity() if drop_path is None else drop_path

    def forward(self, y: Tensor, grid: tuple[int, int], rotations: Tensor | None = None) -> Tensor:
        """Run the block; ``rotations`` is for :meth:`vision_ttt.layers.ViT3TTT.forward`.

        Raises:
            ValueError: T is not h · w.
        """
        y = self.cpe(y, grid)
        y = y + self.drop_path(self.ttt(self.norm1(y), grid, rotations))
        return y + self.drop_path(self.mlp(self.norm2(y), grid))
