"""ViT³: Vision Test-Time Training, a plain backbone of linear cost."""

from __future__ import annotations

from typing import Any

from timm.layers import DropPath, calculate_drop_path_rates
from torch import nn

from vision_ttt.layers import Mlp, ResidualConv2d, ViT3Block, ViT3TTT
from vision_ttt.models.arguments import check_arguments, check_sides, mlp_width
from vision_ttt.models.classifier import linear_head
from vision_ttt.models.family import Family
from vision_ttt.models.image_size import patch_embedding
from vision_ttt.models.plain_backbone import PlainBackbone


class ViT3(PlainBackbone):
    """ViT³ backbone and classifier: images [B, C, H, W] → logits [B, num_classes].

    A patch embedding, ``depth`` blocks, LayerNorm, the mean of the tokens and a linear head (ViT³,
    supplement, Sec. 3 and Table 1). There is no position embedding: the blocks' convolutions encode
    positions, and no weight depends on the image size. Cost and memory are linear in the number of
    tokens.

    Args:
        img_size, patch_size, in_chans, num_classes, embed_dim, depth, dynamic_img_pad, drop_rate,
            drop_path_rate, patch_drop_rate: see :class:`vision_ttt.models.Vittt`.
        num_heads: heads of the gated linear unit; the convolution is one more.
        mlp_ratio: hidden width of the MLP over D.
        qkv_bias: whether queries, keys and values have a bias.
        global_pool: "avg" (published) or "max_norm"; "" applies the head to each token.
        dynamic_img_size: accept any image size; otherwise only ``img_size``.

    Initialisation: projections and inner models normal with standard deviation 0.02, convolutions
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
        num_heads: int = 6,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        global_pool: str = "avg",
        dynamic_img_size: bool = True,
        dynamic_img_pad: bool = False,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        patch_drop_rate: float = 0.0,
    ) -> None:
        check_arguments(
            in_chans=in_chans,
            num_classes=num_classes,
            embed_dim=embed_dim,
            depth=depth,
            num_heads=num_heads,
            qkv_bias=qkv_bias,
            dynamic_img_size=dynamic_img_size,
            dynamic_img_pad=dynamic_img_pad,
            drop_rate=drop_rate,
            drop_path_rate=drop_path_rate,
            patch_drop_rate=patch_drop_rate,
        )
        check_sides(img_size, patch_size, whole_patches=not dynamic_img_size, pad=dynamic_img_pad)
        super().__init__(
            head=linear_head(embed_dim, num_classes),
            patch_embed=patch_embedding(
                img_size, patch_size, in_chans, embed_dim, pad=dynamic_img_pad
            ),
            blocks=[
                ViT3Block(  # random parts in the order in which a seed's weights are drawn
                    embed_dim,
                    mlp=Mlp(embed_dim, mlp_width(embed_dim, mlp_ratio)),
                    cpe=ResidualConv2d(embed_dim),
                    mixer=ViT3TTT(embed_dim, num_heads, qkv_bias=qkv_bias),
                    drop_path=DropPath(rate),
                )
                for rate in calculate_drop_path_rates(drop_path_rate, depth)
            ],
            norm=nn.LayerNorm(embed_dim, eps=1e-6),
            global_pool=global_pool,
            dynamic_img_size=dynamic_img_size,
            drop_rate=drop_rate,
            patch_drop_rate=patch_drop_rate,
        )


# As wide and deep as Vittt-nano; the MLP fills up what it lacks of its parameters.
_NANO = {"embed_dim": 96, "depth": 4, "num_heads": 3, "mlp_ratio": 4.5}

MODELS: dict[str, dict[str, Any]] = {
    "vit3_nano_patch4_32": {**_NANO, "patch_size": 4, "img_size": 32},
    "vit3_nano_patch8_256": {**_NANO, "patch_size": 8, "img_size": 256},
    "vit3_tiny_patch16_224": {"embed_dim": 192, "num_heads": 6},
    "vit3_small_patch16_224": {"embed_dim": 384, "num_heads": 6},
    "vit3_base_patch16_224": {"embed_dim": 768, "num_heads": 12},
}

FAMILY = Family(ViT3, MODELS, __name__, fixed=False)
default_cfgs = FAMILY.default_cfgs

vit3_nano_patch4_32 = FAMILY.entrypoint(
    "vit3_nano_patch4_32",
    "ViT³ for 32 × 32 images and a laptop: 64 tokens, as many parameters as vittt_nano.",
)
vit3_nano_patch8_256 = FAMILY.entrypoint(
    "vit3_nano_patch8_256", "ViT³-nano for 256 × 256 images: 1,024 tokens."
)
vit3_tiny_patch16_224 = FAMILY.entrypoint(
    "vit3_tiny_patch16_224",
    "ViT³-T: 6M parameters, 1.2G MACs, 76.5 % on ImageNet-1K (the authors' figure).",
)
vit3_small_patch16_224 = FAMILY.entrypoint(
    "vit3_small_patch16_224",
    "ViT³-S: 24M parameters, 4.8G MACs, 81.6 % on ImageNet-1K (the authors' figure).",
)
vit3_base_patch16_224 = FAMILY.entrypoint(
    "vit3_base_patch16_224",
    "ViT³-B: 90M parameters, 18.0G MACs, 82.6 % on ImageNet-1K (the authors' figure).",
)
