"""DeiT with the depth-wise convolution that Vittt has: softmax attention, and nothing else new.

It separates what the convolution brings from what the token mixer does, and is no published model.
"""

from __future__ import annotations

from typing import Any

from timm.layers import Attention, DropPath, calculate_drop_path_rates
from torch import Tensor, nn

from vision_ttt.layers import Mlp, ResidualConv2d, ViT3Block
from vision_ttt.models.arguments import check_arguments, check_sides, mlp_width
from vision_ttt.models.classifier import linear_head
from vision_ttt.models.family import Family
from vision_ttt.models.image_size import patch_embedding, position_embedding
from vision_ttt.models.plain_backbone import PlainBackbone


class GridAttention(Attention):
    """timm's multi-head self-attention [B, T, D] → [B, T, D] with biases, as in DeiT.

    It mixes all tokens at quadratic cost and has no use for the grid.

    Args:
        dim: D.
        num_heads: a divisor of D.

    Initialisation: weights normal with standard deviation 0.02, biases zero.

    Raises:
        ValueError: D is no multiple of the number of heads.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        if dim % num_heads:
            raise ValueError(f"dim is {dim}; it must be a multiple of num_heads, {num_heads}")
        super().__init__(dim, num_heads, qkv_bias=True)
        for projection in (self.qkv, self.proj):
            nn.init.trunc_normal_(projection.weight, std=0.02)
            nn.init.zeros_(projection.bias)

    def forward(self, x: Tensor, grid: tuple[int, int], rotations: Tensor | None = None) -> Tensor:
        """Mix tokens; grid and rotations, which other mixers need, are ignored."""
        return super().forward(x)


class ConvDeiT(PlainBackbone):
    """DeiT backbone and classifier with a convolution per block: [B, C, H, W] → [B, num_classes].

    A patch embedding with learned positions, ``depth`` blocks, LayerNorm, the mean of the tokens
    and a linear head. A block is::

        y ← y + DWConv3×3(y)
        y ← y + Attention(LN(y))
        y ← y + MLP(LN(y))

    Cost is quadratic in the number of tokens.

    Args:
        img_size: image height and width in pixels, one number for both.
        patch_size: patch side in pixels.
        in_chans: image channels.
        num_classes: logits; 0 for the pooled feature itself.
        embed_dim: D.
        depth: number of blocks.
        num_heads: of the attention.
        mlp_ratio: hidden width of the MLP over D.
        global_pool: "avg" or "max_norm"; "" returns the tokens.
        dynamic_img_size: accept any image size; the position embedding is interpolated to it.
        dynamic_img_pad: pad sizes that are not multiples of the patch, right and bottom.
        drop_rate: dropout before the head.
        drop_path_rate: stochastic depth of the last block, rising linearly from 0.

    Initialisation: projections, embeddings normal with standard deviation 0.02, convolutions
    PyTorch's default, norms the identity, biases zero.

    Raises:
        ValueError: an argument is out of its range; in forward, an image does not fit.
        TypeError: an argument is of another type.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        embed_dim: int = 192,
        depth: int = 12,
        num_heads: int = 3,
        mlp_ratio: float = 4.0,
        global_pool: str = "avg",
        dynamic_img_size: bool = False,
        dynamic_img_pad: bool = False,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        check_arguments(
            in_chans=in_chans,
            num_classes=num_classes,
            embed_dim=embed_dim,
            depth=depth,
            num_heads=num_heads,
            dynamic_img_size=dynamic_img_size,
            dynamic_img_pad=dynamic_img_pad,
            drop_rate=drop_rate,
            drop_path_rate=drop_path_rate,
        )
        check_sides(img_size, patch_size, whole_patches=not dynamic_img_size, pad=dynamic_img_pad)
        patch_embed = patch_embedding(
            img_size, patch_size, in_chans, embed_dim, pad=dynamic_img_pad
        )
        super().__init__(
            patch_embed=patch_embed,
            pos_embed=position_embedding(patch_embed),
            blocks=[
                ViT3Block(
                    embed_dim,
                    mlp=Mlp(embed_dim, mlp_width(embed_dim, mlp_ratio)),
                    cpe=ResidualConv2d(embed_dim),
                    mixer=GridAttention(embed_dim, num_heads),
                    drop_path=DropPath(rate),
                )
                for rate in calculate_drop_path_rates(drop_path_rate, depth)
            ],
            norm=nn.LayerNorm(embed_dim, eps=1e-6),
            head=linear_head(embed_dim, num_classes),
            global_pool=global_pool,
            dynamic_img_size=dynamic_img_size,
            drop_rate=drop_rate,
        )


MODELS: dict[str, dict[str, Any]] = {
    "conv_deit_nano_patch4_32": {
        "embed_dim": 96,
        "depth": 5,
        "num_heads": 3,
        "patch_size": 4,
        "img_size": 32,
    },
    "conv_deit_tiny_patch16_224": {"embed_dim": 192, "num_heads": 3},
}

FAMILY = Family(ConvDeiT, MODELS, __name__, fixed=True)
default_cfgs = FAMILY.default_cfgs

conv_deit_nano_patch4_32 = FAMILY.entrypoint(
    "conv_deit_nano_patch4_32",
    "ConvDeiT for 32 × 32 images and a laptop: 64 tokens, as many parameters as Vittt-nano.",
)
conv_deit_tiny_patch16_224 = FAMILY.entrypoint(
    "conv_deit_tiny_patch16_224", "ConvDeiT of DeiT-T's size."
)
