"""Vim: Vision Mamba, a plain backbone of bidirectional selective scans."""

from __future__ import annotations

from typing import Any

from timm.layers import to_2tuple
from torch import nn

from vision_ttt.layers import ExtraTokens
from vision_ttt.models.arguments import check_arguments, check_sides, choose
from vision_ttt.models.classifier import linear_head
from vision_ttt.models.family import Family
from vision_ttt.models.image_size import position_embedding
from vision_ttt.models.mamba_parts import mamba_blocks, mamba_patches
from vision_ttt.models.plain_backbone import PlainBackbone

CLASS_TOKENS = ("middle", "head", "end", "double")
"""Pooling by class tokens, named by their placement."""

POOLS = (*CLASS_TOKENS, "avg", "max_norm", "")
"""Accepted values of ``global_pool``."""


class Vim(PlainBackbone):
    """Vim backbone and classifier: images [B, C, H, W] → logits [B, num_classes].

    A patch embedding, a class token in the middle of the sequence, learned positions of all tokens,
    ``depth`` blocks :class:`vision_ttt.layers.MambaBlock`, RMSNorm, the class token and a linear
    head (Vim, Sec. 3.2). Cost and memory are linear in the number of tokens.

    Args:
        img_size, patch_size, in_chans, num_classes, embed_dim, depth, dynamic_img_pad, drop_rate,
            drop_path_rate, patch_drop_rate: see :class:`vision_ttt.models.Vittt`.
        stride: pixels from patch to patch, at most the patch side, which is the default. Below
            it patches overlap: Vim is fine-tuned with half of it for four times the tokens.
        state: numbers of each channel's state, N.
        global_pool: a class token, "middle" (published), "head", "end" or "double" (the mean of
            one at either end); or none, "avg", "max_norm"; "" applies the head to each token.
        dynamic_img_size: accept any image size; the positions of image tokens are interpolated.

    Initialisation: as :class:`vision_ttt.layers.BidirectionalMamba`, its output projections divided
    by √depth; positions, class tokens and head normal with standard deviation 0.02, patches with
    (C · patch²)^-½, biases zero.

    Raises:
        ValueError: an argument is out of its range; in forward, an image does not fit.
        TypeError: an argument is of another type.
    """

    keeps_grid = False

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        stride: int | None = None,
        depth: int = 24,
        embed_dim: int = 192,
        in_chans: int = 3,
        num_classes: int = 1000,
        state: int = 16,
        global_pool: str = "middle",
        dynamic_img_size: bool = False,
        dynamic_img_pad: bool = False,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        patch_drop_rate: float = 0.0,
    ) -> None:
        check_arguments(
            depth=depth,
            embed_dim=embed_dim,
            in_chans=in_chans,
            num_classes=num_classes,
            state=state,
            dynamic_img_size=dynamic_img_size,
            dynamic_img_pad=dynamic_img_pad,
            drop_rate=drop_rate,
            drop_path_rate=drop_path_rate,
            patch_drop_rate=patch_drop_rate,
        )
        if stride in (None, patch_size):
            whole = not dynamic_img_size
            check_sides(img_size, patch_size, whole_patches=whole, pad=dynamic_img_pad)
        else:
            _check_stride(stride, img_size, patch_size, pad=dynamic_img_pad)
        choose("global_pool", global_pool, POOLS)
        patch_embed = mamba_patches(
            img_size, patch_size, in_chans, embed_dim, pad=dynamic_img_pad, stride=stride
        )
        class_tokens = None
        if global_pool in CLASS_TOKENS:
            class_tokens = ExtraTokens(embed_dim, global_pool, pos_embed=True)
        super().__init__(
            patch_embed=patch_embed,
            pos_embed=position_embedding(patch_embed),
            class_tokens=class_tokens,
            blocks=mamba_blocks(embed_dim, depth, state=state, drop_path_rate=drop_path_rate),
            norm=nn.RMSNorm(embed_dim, eps=1e-5),
            head=linear_head(embed_dim, num_classes),
            global_pool=global_pool,
            dynamic_img_size=dynamic_img_size,
            drop_rate=drop_rate,
            patch_drop_rate=patch_drop_rate,
        )


def _check_stride(
    stride: int,
    img_size: int | tuple[int, int],
    patch_size: int | tuple[int, int],
    *,
    pad: bool,
) -> None:
    """Check patches that overlap.

    Raises:
        ValueError: the stride is above the patch side, or images are to be padded.
        TypeError: the stride is not a whole number.
    """
    check_sides(img_size, patch_size, whole_patches=False)
    check_arguments(stride=stride)
    if stride > min(to_2tuple(patch_size)):
        raise ValueError(f"stride is {stride}; accepted: 1 to patch_size, {patch_size}")
    if pad:
        raise ValueError("dynamic_img_pad is not supported for patches that overlap (stride)")


MODELS: dict[str, dict[str, Any]] = {
    "vim_nano_patch4_32": {"embed_dim": 96, "depth": 7, "patch_size": 4, "img_size": 32},
    "vim_tiny_patch16_224": {"embed_dim": 192},
    "vim_small_patch16_224": {"embed_dim": 384},
    "vim_base_patch16_224": {"embed_dim": 768},
}

FAMILY = Family(Vim, MODELS, __name__, fixed=True)
default_cfgs = FAMILY.default_cfgs

vim_nano_patch4_32 = FAMILY.entrypoint(
    "vim_nano_patch4_32",
    "Vim for 32 × 32 images and a laptop: 64 tokens, as many parameters as vittt_nano.",
)
vim_tiny_patch16_224 = FAMILY.entrypoint(
    "vim_tiny_patch16_224", "Vim-T: 7M parameters, 76.1 % on ImageNet-1K (Mamba-Reg, Table 3)."
)
vim_small_patch16_224 = FAMILY.entrypoint(
    "vim_small_patch16_224", "Vim-S: 26M parameters, 80.5 % on ImageNet-1K (Mamba-Reg, Table 3)."
)
vim_base_patch16_224 = FAMILY.entrypoint(
    "vim_base_patch16_224", "Vim-B: 98M parameters, 81.8 % on ImageNet-1K (Mamba-Reg, Sec. 1)."
)
