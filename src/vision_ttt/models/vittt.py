"""Vittt: Vision Test-Time Training (Vision-TTT, Sec. 4), a plain backbone of linear cost."""

from __future__ import annotations

from typing import Any

from timm.layers import DropPath, calculate_drop_path_rates
from torch import nn

from vision_ttt.layers import ExtraTokens, VitttBlock
from vision_ttt.models.arguments import check_arguments, check_sides, choose, mlp_width
from vision_ttt.models.classifier import linear_head
from vision_ttt.models.family import Family
from vision_ttt.models.image_size import patch_embedding, position_embedding
from vision_ttt.models.plain_backbone import PlainBackbone
from vision_ttt.models.vittt_designs import check_design, make_mixer

CLASS_TOKENS = ("head", "middle", "double")
"""Pooling by class tokens, named by their placement (Vision-TTT, Table 4)."""

POOLS = ("avg", "max_norm", *CLASS_TOKENS, "")
"""Accepted values of ``global_pool``."""


class Vittt(PlainBackbone):
    """Vision-TTT backbone and classifier: images [B, C, H, W] → logits [B, num_classes].

    A patch embedding with learned positions (Eq. 8), ``depth`` blocks (Eq. 9), LayerNorm, a pooled
    feature and a linear head (Eq. 10). Cost and memory are linear in the number of tokens.

    Args:
        img_size: image height and width in pixels, one number for both.
        patch_size: patch side in pixels.
        in_chans: image channels.
        num_classes: logits; 0 for the pooled feature itself.
        global_pool: "avg" (published), "max_norm", or a class token: "head", "middle", "double"
            (the mean of both); "" applies the head to each token.
        embed_dim: D.
        depth: number of blocks.
        num_heads: heads per direction.
        mlp_ratio: SwiGLU hidden width over D.
        design: a step of Table 3's route, see :mod:`vision_ttt.models.vittt_designs`; "conv2d" is
            the published model.
        inner_model: "linear" (published: TTT-Linear, base rate 1) or "mlp" (TTT-MLP, base rate 0.1;
            :func:`vision_ttt.layers.warm_up_inner_rates` is its warm-up).
        mini_batch_size: tokens per inner gradient step, b.
        learnable_states: how many initial inner states each block learns, 0 to 2 (Fig. 7b); by
            default one per direction.
        dynamic_img_size: accept any image size; the position embedding is interpolated to it.
        dynamic_img_pad: pad sizes that are not multiples of the patch, right and bottom.
        drop_rate: dropout before the head.
        drop_path_rate: stochastic depth of the last block, rising linearly from 0.
        patch_drop_rate: share of the tokens left out in training; see
            :meth:`vision_ttt.models.plain_backbone.PlainBackbone.forward_features`.

    Initialisation: projections, embeddings and tokens normal with standard deviation 0.02,
    convolutions PyTorch's default, norms the identity, head zero bias; the inner models as in
    :class:`vision_ttt.layers.InnerLearner`. The first loss is close to ln(num_classes).

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
        global_pool: str = "avg",
        embed_dim: int = 192,
        depth: int = 12,
        num_heads: int = 3,
        mlp_ratio: float = 8 / 3,
        design: str = "conv2d",
        inner_model: str = "linear",
        mini_batch_size: int = 16,
        learnable_states: int | None = None,
        dynamic_img_size: bool = False,
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
            mini_batch_size=mini_batch_size,
            dynamic_img_size=dynamic_img_size,
            dynamic_img_pad=dynamic_img_pad,
            drop_rate=drop_rate,
            drop_path_rate=drop_path_rate,
            patch_drop_rate=patch_drop_rate,
        )
        check_sides(img_size, patch_size, whole_patches=not dynamic_img_size, pad=dynamic_img_pad)
        check_design(design, inner_model, global_pool=global_pool)
        choose("global_pool", global_pool, POOLS)

        def block(rate: float) -> VitttBlock:
            mixer = make_mixer(
                embed_dim,
                num_heads,
                design=design,
                inner_model=inner_model,
                mini_batch_size=mini_batch_size,
                learnable_states=learnable_states,
                drop_path=DropPath(rate),
            )
            hidden = mlp_width(embed_dim, mlp_ratio)
            return VitttBlock(mixer, embed_dim, hidden, drop_path=DropPath(rate))

        patch_embed = patch_embedding(
            img_size, patch_size, in_chans, embed_dim, pad=dynamic_img_pad
        )
        pos_embed = position_embedding(patch_embed)
        class_tokens = None
        if global_pool in CLASS_TOKENS:
            class_tokens = ExtraTokens(embed_dim, placement=global_pool)
        super().__init__(
            patch_embed=patch_embed,
            pos_embed=pos_embed,
            class_tokens=class_tokens,
            blocks=[block(rate) for rate in calculate_drop_path_rates(drop_path_rate, depth)],
            norm=nn.LayerNorm(embed_dim, eps=1e-6),
            head=linear_head(embed_dim, num_classes),
            global_pool=global_pool,
            dynamic_img_size=dynamic_img_size,
            drop_rate=drop_rate,
            patch_drop_rate=patch_drop_rate,
        )


_NANO = {"embed_dim": 96, "depth": 4, "num_heads": 3}

MODELS: dict[str, dict[str, Any]] = {
    "vittt_nano_patch2_28": {**_NANO, "patch_size": 2, "img_size": 28},
    "vittt_nano_patch4_32": {**_NANO, "patch_size": 4, "img_size": 32},
    "vittt_nano_patch8_256": {**_NANO, "patch_size": 8, "img_size": 256},
    "vittt_tiny_patch16_224": {"embed_dim": 192, "num_heads": 3},
    "vittt_small_patch16_224": {"embed_dim": 384, "num_heads": 6},
    "vittt_base_patch16_224": {"embed_dim": 768, "num_heads": 12},
}

FAMILY = Family(Vittt, MODELS, __name__, fixed=True)
default_cfgs = FAMILY.default_cfgs

vittt_nano_patch2_28 = FAMILY.entrypoint(
    "vittt_nano_patch2_28", "Vittt-nano for the 28 × 28 images of Fashion-MNIST: 196 tokens."
)
vittt_nano_patch4_32 = FAMILY.entrypoint(
    "vittt_nano_patch4_32", "Vittt for 32 × 32 images and a laptop: 64 tokens, four mini-batches."
)
vittt_nano_patch8_256 = FAMILY.entrypoint(
    "vittt_nano_patch8_256", "Vittt-nano for 256 × 256 images: 1,024 tokens."
)
vittt_tiny_patch16_224 = FAMILY.entrypoint(
    "vittt_tiny_patch16_224",
    "Vittt-T of Vision-TTT: 6.98M parameters, 1.44G MACs, 77.7 % on ImageNet-1K.",
)
vittt_small_patch16_224 = FAMILY.entrypoint(
    "vittt_small_patch16_224",
    "Vittt-S of Vision-TTT: 26M parameters, 5.3G MACs, 81.8 % on ImageNet-1K.",
)
vittt_base_patch16_224 = FAMILY.entrypoint(
    "vittt_base_patch16_224",
    "Vittt-B of Vision-TTT: 102M parameters, 20.3G MACs, 82.7 % on ImageNet-1K.",
)
