"""ViT³: Vision Test-Time Training, a plain backbone of linear cost.

Shape letters: B images, C channels, T tokens on a grid (h, w), D width.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import DropPath, PatchEmbed, calculate_drop_path_rates
from timm.models import generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from vision_ttt.layers import Mlp, ViT3Block, ViT3TTT
from vision_ttt.models.arguments import check_arguments, check_sides, mlp_width
from vision_ttt.models.building import build_model, pretrained_cfg
from vision_ttt.models.image_size import check_image_size, embed_patches
from vision_ttt.models.pooled_classifier import PooledClassifier, choose, feature_cfg

torch.fx.wrap("check_image_size")


class ViT3(PooledClassifier):
    """ViT³ backbone and classifier: images [B, C, H, W] → logits [B, num_classes].

    A patch embedding, ``depth`` blocks, LayerNorm, the mean of the tokens and a linear head (ViT³,
    supplement, Sec. 3 and Table 1). There is no position embedding: the blocks' convolutions tell
    the tokens where they are, so that weights serve any image size. Cost and memory are linear in
    the number of tokens.

    Args:
        img_size: image height and width in pixels, one number for both.
        patch_size: patch side in pixels.
        in_chans: image channels.
        num_classes: logits; 0 for the pooled feature itself.
        embed_dim: D.
        depth: number of blocks.
        num_heads: heads of the gated linear unit; the convolution is one more.
        mlp_ratio: hidden width of the MLP over D.
        qkv_bias: whether queries, keys and values have a bias.
        global_pool: "avg" (published); "" returns the tokens.
        dynamic_img_size: accept any image size; otherwise only ``img_size``.
        dynamic_img_pad: pad sizes that are not multiples of the patch, right and bottom.
        drop_rate: dropout before the head.
        drop_path_rate: stochastic depth of the last block, rising linearly from 0.

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
        )
        check_sides(img_size, patch_size, whole_patches=not dynamic_img_size, pad=dynamic_img_pad)
        super().__init__(embed_dim, num_classes, global_pool, drop_rate)
        self.embed_dim = embed_dim
        self.in_chans = in_chans
        self.dynamic_img_size = dynamic_img_size
        self.dynamic_img_pad = dynamic_img_pad
        self.patch_embed = PatchEmbed(
            img_size,
            patch_size,
            in_chans,
            embed_dim,
            strict_img_size=False,  # check_image_size says it more clearly, and as a ValueError
            dynamic_img_pad=dynamic_img_pad,
            output_fmt="NHWC",
            flatten=False,
        )
        self.blocks = nn.ModuleList(
            ViT3Block(
                embed_dim,
                num_heads,
                mlp=Mlp(embed_dim, mlp_width(embed_dim, mlp_ratio)),
                qkv_bias=qkv_bias,
                drop_path=DropPath(rate),
            )
            for rate in calculate_drop_path_rates(drop_path_rate, depth)
        )
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6)
        self.feature_info = [
            {"module": f"blocks.{i}", "num_chs": embed_dim, "reduction": patch_size}
            for i in range(depth)
        ]

    # timm's contract

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """The inner models' initial states (vectors go anyway)."""
        return inner_states(self)

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Layer groups for layer decay: stem, each block, the final norm."""
        return {
            "stem": r"^patch_embed",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }

    @torch.jit.ignore
    def set_input_size(
        self,
        img_size: int | tuple[int, int] | None = None,
        patch_size: int | tuple[int, int] | None = None,
    ) -> None:
        """Make the model one of another image or patch size, patch weights interpolated."""
        self.patch_embed.set_input_size(img_size=img_size, patch_size=patch_size)
        for info in self.feature_info:
            info["reduction"] = self.patch_embed.feat_ratio()

    # forward

    def _embed(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Tokens [B, T, D] and their grid."""
        self._refuse_tracing()
        dynamic, pad = self.dynamic_img_size, self.dynamic_img_pad
        check_image_size(x, self.patch_embed, self.in_chans, dynamic=dynamic, pad=pad)
        x = embed_patches(x, self.patch_embed, pad=pad)  # [B, h, w, D]
        return x.flatten(1, 2), (x.shape[1], x.shape[2])

    def forward_features(self, x: Tensor) -> Tensor:
        """Normalised tokens [B, T, D] of images [B, C, H, W]."""
        x, grid = self._embed(x)
        for block in self.blocks:
            x = self._run(block, x, grid)
        return self.norm(x)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Features after chosen blocks, and the final tokens.

        Args:
            x: images [B, C, H, W].
            indices: which blocks, or how many of the last ones; all by default.
            norm: apply the final norm to each feature.
            stop_early: run no block after the last chosen one.
            output_fmt: "NCHW" for maps [B, D, h, w] or "NLC" for tokens [B, T, D].
            intermediates_only: return only the list.

        Raises:
            ValueError: an unknown output_fmt.
        """
        choose("output_fmt", output_fmt, ("NCHW", "NLC"))
        taken, last = feature_take_indices(len(self.blocks), indices)
        x, grid = self._embed(x)
        features = []
        for index, block in enumerate(self.blocks[: last + 1] if stop_early else self.blocks):
            x = self._run(block, x, grid)
            if index in taken:
                y = self.norm(x) if norm else x
                if output_fmt == "NCHW":
                    y = y.unflatten(1, grid).permute(0, 3, 1, 2).contiguous()
                features.append(y)
        return features if intermediates_only else (self.norm(x), features)


def inner_states(model: nn.Module) -> set[str]:
    """Names of the learned states that the inner models begin with."""
    return {
        f"{name}.{state}"
        for name, module in model.named_modules()
        if isinstance(module, ViT3TTT)
        for state in ("w1", "w2", "w3")
    }


SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"embed_dim": 192, "num_heads": 6},
    "small": {"embed_dim": 384, "num_heads": 6},
    "base": {"embed_dim": 768, "num_heads": 12},
}

default_cfgs = generate_default_cfgs(
    {f"vit3_{size}_patch16_224": pretrained_cfg(224, fixed=False) for size in SIZES}
)


def _create(size: str, pretrained: bool, **kwargs: Any) -> ViT3:
    """Build a ViT³ of a size in ``SIZES`` through timm; a wrong keyword raises TypeError."""
    return build_model(
        ViT3,
        f"vit3_{size}_patch16_224",
        pretrained,
        feature_cfg=feature_cfg(kwargs.get("depth", 12)),
        **{**SIZES[size], **kwargs},
    )


@register_model
def vit3_tiny_patch16_224(pretrained: bool = False, **kwargs: Any) -> ViT3:
    """ViT³-T: 6M parameters, 1.2G MACs, 76.5 % on ImageNet-1K (the authors' figure)."""
    return _create("tiny", pretrained, **kwargs)


@register_model
def vit3_small_patch16_224(pretrained: bool = False, **kwargs: Any) -> ViT3:
    """ViT³-S: 24M parameters, 4.8G MACs, 81.6 % on ImageNet-1K (the authors' figure)."""
    return _create("small", pretrained, **kwargs)


@register_model
def vit3_base_patch16_224(pretrained: bool = False, **kwargs: Any) -> ViT3:
    """ViT³-B: 90M parameters, 18.0G MACs, 82.6 % on ImageNet-1K (the authors' figure)."""
    return _create("base", pretrained, **kwargs)
