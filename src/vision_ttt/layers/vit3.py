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
        num_heads: H of the published token mixer, :class:`vision_ttt.layers.ViT3TTT`.
        cpe: another position encoding [B, T, D], (h, w) → [B, T, D], its residual included; by
            default :class:`vision_ttt.layers.ResidualConv2d`.
        mixer: another token mixer [B, T, D], (h, w), rotations → [B, T, D], given instead of
            num_heads.
        mlp: [B, T, D], (h, w) → [B, T, D]; by default :class:`vision_ttt.layers.Mlp`, 4 D wide.
        norm_eps: of the LayerNorms.
        drop_path: applied to the TTT and the MLP branch, e.g. ``timm.layers.DropPath``.

    Raises:
        ValueError: not exactly one of num_heads and mixer is given.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int | None = None,
        *,
        cpe: nn.Module | None = None,
        mixer: nn.Module | None = None,
        mlp: nn.Module | None = None,
        norm_eps: float = 1e-6,
        drop_path: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if (num_heads is None) == (mixer is None):
            raise ValueError(f"give num_heads or mixer, one of them; got num_heads={num_heads}")
        self.cpe = ResidualConv2d(dim) if cpe is None else cpe
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.ttt = ViT3TTT(dim, num_heads) if mixer is None else mixer
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = Mlp(dim, 4 * dim) if mlp is None else mlp
        self.drop_path = nn.Identity() if drop_path is None else drop_path

    def forward(self, y: Tensor, grid: tuple[int, int], rotations: Tensor | None = None) -> Tensor:
        """Run the block; ``rotations`` as in :meth:`vision_ttt.layers.ViT3TTT.forward`.

        Raises:
            ValueError: T is not h · w.
        """
        y = self.cpe(y, grid)
        y = y + self.drop_path(self.ttt(self.norm1(y), grid, rotations))
        return y + self.drop_path(self.mlp(self.norm2(y), grid))
