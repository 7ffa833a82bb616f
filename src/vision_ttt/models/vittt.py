"""Vittt: Vision Test-Time Training (Vision-TTT, Sec. 4), a plain backbone of linear cost.

Shape letters: B images, C channels, T tokens on a grid (h, w), D width, N = T + class tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import DropPath, PatchEmbed, calculate_drop_path_rates
from timm.models import generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from vision_ttt.layers import ExtraTokens, GatedNorm, InnerLearner, VitttBlock
from vision_ttt.layers.pooling import POOLS, pool_tokens
from vision_ttt.models.arguments import check_arguments, check_sides, mlp_width
from vision_ttt.models.building import build_model, pretrained_cfg
from vision_ttt.models.design_route import check_design, make_mixer
from vision_ttt.models.image_size import (
    check_image_size,
    checkpoint_filter_fn,
    embed_patches,
    positions_for,
)
from vision_ttt.models.pooled_classifier import Classifier, choose, feature_cfg

torch.fx.wrap("check_image_size")
torch.fx.wrap("positions_for")


class Vittt(Classifier):
    """Vision-TTT backbone and classifier: images [B, C, H, W] → logits [B, num_classes].

    A patch embedding with learned positions (Eq. 8), ``depth`` blocks (Eq. 9), LayerNorm, a pooled
    feature and a linear head (Eq. 10). Cost and memory are linear in the number of tokens.

    Args:
        img_size: image height and width in pixels, one number for both.
        patch_size: patch side in pixels.
        in_chans: image channels.
        num_classes: logits; 0 for the pooled feature itself.
        global_pool: "avg" (published), "max_norm", or a class token: "head", "middle", "double"
            (the mean of both); "" returns the tokens.
        embed_dim: D.
        depth: number of blocks.
        num_heads: heads per direction.
        mlp_ratio: SwiGLU hidden width over D.
        design: a step of Table 3's route, see :mod:`vision_ttt.models.design_route`; "conv2d" is
            the published model.
        inner_model: "linear" (published: TTT-Linear, base rate 1) or "mlp" (TTT-MLP, base rate 0.1;
            :func:`vision_ttt.layers.warm_up_inner_rates` is its warm-up).
        mini_batch_size: tokens per inner gradient step, b.
        learnable_states: how many initial inner states each block learns, 0 to 2 (Fig. 7b); by
            default one per direction.
        fused: run what stands between the projections of each block's TTT-Linear layer as one op:
            less time and memory in training. Its parts are then not called, see
            :class:`vision_ttt.layers.TTTLinear`. It takes a design with a Conv1d.
        fused_mlp: run each block's MLP as one op, which keeps only its input for the backward pass:
            a third less memory in training for some more time. See
            :class:`vision_ttt.layers.SwiGLU`.
        dynamic_img_size: accept any image size; the position embedding is interpolated to it.
        dynamic_img_pad: pad sizes that are not multiples of the patch, right and bottom.
        drop_rate: dropout before the head.
        drop_path_rate: stochastic depth of the last block, rising linearly from 0.

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
        fused: bool = False,
        fused_mlp: bool = False,
        dynamic_img_size: bool = False,
        dynamic_img_pad: bool = False,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        check_arguments(
            in_chans=in_chans,
            num_classes=num_classes,
            embed_dim=embed_dim,
            depth=depth,
            num_heads=num_heads,
            mini_batch_size=mini_batch_size,
            fused=fused,
            fused_mlp=fused_mlp,
            dynamic_img_size=dynamic_img_size,
            dynamic_img_pad=dynamic_img_pad,
            drop_rate=drop_rate,
            drop_path_rate=drop_path_rate,
        )
        check_sides(img_size, patch_size, whole_patches=not dynamic_img_size, pad=dynamic_img_pad)
        check_design(design, inner_model, fused=fused, global_pool=global_pool)
        self.global_pool = choose("global_pool", global_pool, POOLS)
        self.num_classes = num_classes
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dim
        self.in_chans = in_chans
        self.dynamic_img_size = dynamic_img_size
        self.dynamic_img_pad = dynamic_img_pad
        self.grad_checkpointing = False

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
        self.pos_embed = nn.Parameter(torch.empty(1, self.patch_embed.num_patches, embed_dim))
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        with_tokens = global_pool in ("head", "middle", "double")
        self.class_tokens = ExtraTokens(embed_dim, global_pool) if with_tokens else None

        self.blocks = nn.ModuleList()
        for rate in calculate_drop_path_rates(drop_path_rate, depth):
            mixer = make_mixer(
                embed_dim,
                num_heads,
                design=design,
                inner_model=inner_model,
                mini_batch_size=mini_batch_size,
                learnable_states=learnable_states,
                fused=fused,
                drop_path=DropPath(rate),
            )
            hidden = mlp_width(embed_dim, mlp_ratio)
            self.blocks.append(
                VitttBlock(mixer, embed_dim, hidden, drop_path=DropPath(rate), fused_mlp=fused_mlp)
            )
        reduction = self.patch_embed.feat_ratio()
        self.feature_info = [
            {"module": f"blocks.{i}", "num_chs": embed_dim, "reduction": reduction}
            for i in range(depth)
        ]
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = self._make_head(embed_dim, num_classes, self.pos_embed)

    # timm's contract

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Positions, class tokens, post norms and all of the inner models (vectors go anyway)."""
        names = {"pos_embed"} if self.class_tokens is None else {"pos_embed", "class_tokens.tokens"}
        for module_name, module in self.named_modules():
            if isinstance(module, (InnerLearner, GatedNorm)):
                names |= {f"{module_name}.{name}" for name, _ in module.named_parameters()}
        return names

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Layer groups for layer decay: stem, each block, the final norm."""
        return {
            "stem": r"^pos_embed|^class_tokens|^patch_embed",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head by a fresh one, and where given the pooling (its tokens must exist)."""
        if global_pool is not None:
            tokens = () if self.class_tokens is None else (self.class_tokens.placement,)
            self.global_pool = choose("global_pool", global_pool, ("avg", "max_norm", "", *tokens))
        self.num_classes = num_classes
        head = self._make_head(self.embed_dim, num_classes, self.pos_embed)
        self.head = head.train(self.training)

    @torch.jit.ignore
    def set_input_size(
        self,
        img_size: int | tuple[int, int] | None = None,
        patch_size: int | tuple[int, int] | None = None,
    ) -> None:
        """Make the model one of another image or patch size, its weights interpolated."""
        former = tuple(self.patch_embed.grid_size)
        self.patch_embed.set_input_size(img_size=img_size, patch_size=patch_size)
        grid = tuple(self.patch_embed.grid_size)
        if grid != former:
            resized = positions_for(grid, self.pos_embed.detach(), former)
            self.pos_embed = nn.Parameter(resized, requires_grad=self.pos_embed.requires_grad)
        for info in self.feature_info:
            info["reduction"] = self.patch_embed.feat_ratio()

    # forward

    def _embed(self, x: Tensor) -> tuple[Tensor, tuple[int, int], tuple[int, ...]]:
        """Tokens [B, N, D], their grid, and the positions of class tokens among them."""
        self._refuse_tracing()
        dynamic, pad = self.dynamic_img_size, self.dynamic_img_pad
        check_image_size(x, self.patch_embed, self.in_chans, dynamic=dynamic, pad=pad)
        x = embed_patches(x, self.patch_embed, pad=pad)  # [B, h, w, D]
        grid = (x.shape[1], x.shape[2])
        positions = positions_for(grid, self.pos_embed, self.patch_embed.grid_size)
        x = x.flatten(1, 2) + positions  # [B, T, D]
        if self.class_tokens is None:
            return x, grid, ()
        extra = self.class_tokens.positions(x.shape[1])
        return self.class_tokens.insert(x), grid, extra

    def forward_features(self, x: Tensor) -> Tensor:
        """Normalised tokens [B, N, D] of images [B, C, H, W]."""
        x, grid, extra = self._embed(x)
        for block in self.blocks:
            x = self._run(block, x, grid, extra)
        return self.norm(x)

    def pool(self, x: Tensor) -> Tensor:
        """The classification feature [B, D] of tokens [B, N, D]."""
        return pool_tokens(x, self.global_pool, self.class_tokens)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Logits of tokens [B, N, D], or with ``pre_logits`` the feature the head would see."""
        x = self.head_drop(self.pool(x))
        return x if pre_logits else self.head(x)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Any] | tuple[Tensor, list[Any]]:
        """Features after chosen blocks, and the final tokens.

        Args:
            x: images [B, C, H, W].
            indices: which blocks, or how many of the last ones; all by default.
            return_prefix_tokens: pair each feature with the class tokens [B, n, D] of that depth.
            norm: apply the final norm to each feature.
            stop_early: run no block after the last chosen one.
            output_fmt: "NCHW" for maps [B, D, h, w] or "NLC" for tokens [B, T, D].
            intermediates_only: return only the list.

        Raises:
            ValueError: an unknown output_fmt, or class tokens asked of a model without.
        """
        choose("output_fmt", output_fmt, ("NCHW", "NLC"))
        if return_prefix_tokens and self.class_tokens is None:
            raise ValueError("return_prefix_tokens: this model has no class tokens")
        taken, last = feature_take_indices(len(self.blocks), indices)
        x, grid, extra = self._embed(x)
        features: list[Any] = []
        for index, block in enumerate(self.blocks[: last + 1] if stop_early else self.blocks):
            x = self._run(block, x, grid, extra)
            if index not in taken:
                continue
            y = self.norm(x) if norm else x
            tokens = None
            if self.class_tokens is not None:
                y, tokens = self.class_tokens.extract(y)
            if output_fmt == "NCHW":
                y = y.unflatten(1, grid).permute(0, 3, 1, 2).contiguous()
            features.append((y, tokens) if return_prefix_tokens else y)
        return features if intermediates_only else (self.norm(x), features)


SIZES: dict[str, dict[str, Any]] = {
    "nano": {"embed_dim": 96, "depth": 4, "num_heads": 3, "patch_size": 4, "img_size": 32},
    "tiny": {"embed_dim": 192, "depth": 12, "num_heads": 3},
    "small": {"embed_dim": 384, "depth": 12, "num_heads": 6},
    "base": {"embed_dim": 768, "depth": 12, "num_heads": 12},
}

default_cfgs = generate_default_cfgs(
    {
        "vittt_nano_patch4_32": pretrained_cfg(32, fixed=True),
        "vittt_tiny_patch16_224": pretrained_cfg(224, fixed=True),
        "vittt_small_patch16_224": pretrained_cfg(224, fixed=True),
        "vittt_base_patch16_224": pretrained_cfg(224, fixed=True),
    }
)


def create_vittt(variant: str, size: str, pretrained: bool = False, **kwargs: Any) -> Vittt:
    """Build a Vittt of a size in ``SIZES`` through timm; a wrong keyword raises TypeError."""
    arguments = {**SIZES[size], **kwargs}
    return build_model(
        Vittt,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=feature_cfg(arguments["depth"]),
        **arguments,
    )


@register_model
def vittt_nano_patch4_32(pretrained: bool = False, **kwargs: Any) -> Vittt:
    """Vittt for 32 × 32 images and a laptop: 64 tokens, four mini-batches."""
    return create_vittt("vittt_nano_patch4_32", "nano", pretrained, **kwargs)


@register_model
def vittt_tiny_patch16_224(pretrained: bool = False, **kwargs: Any) -> Vittt:
    """Vittt-T of Vision-TTT: 6.98M parameters, 1.44G MACs, 77.7 % on ImageNet-1K."""
    return create_vittt("vittt_tiny_patch16_224", "tiny", pretrained, **kwargs)


@register_model
def vittt_small_patch16_224(pretrained: bool = False, **kwargs: Any) -> Vittt:
    """Vittt-S of Vision-TTT: 26M parameters, 5.3G MACs, 81.8 % on ImageNet-1K."""
    return create_vittt("vittt_small_patch16_224", "small", pretrained, **kwargs)


@register_model
def vittt_base_patch16_224(pretrained: bool = False, **kwargs: Any) -> Vittt:
    """Vittt-B of Vision-TTT: 102M parameters, 20.3G MACs, 82.7 % on ImageNet-1K."""
    return create_vittt("vittt_base_patch16_224", "base", pretrained, **kwargs)
