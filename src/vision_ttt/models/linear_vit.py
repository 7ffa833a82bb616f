"""ViTs of timm whose attention became test-time training: a backbone of linear cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import timm
from timm.models import (
    generate_default_cfgs,
    get_model_args,
    get_pretrained_cfg,
    register_model,
)
from timm.models._input import update_model_args
from torch import Tensor, nn

from vision_ttt.layers import ExtraTokens
from vision_ttt.layers.norm_precision import normalised
from vision_ttt.models.arguments import choose
from vision_ttt.models.building import build_model, feature_cfg, pretrained_cfg
from vision_ttt.models.fitted_weights import pretrained_filter_fn
from vision_ttt.models.plain_backbone import PlainBackbone
from vision_ttt.models.vit_parts import (
    check_vit,
    inherited_weights,
    layer_scale,
    norm_argument,
    rotary_embedding,
    ttt_attention,
)

CLASS_TOKEN = ("drop", "keep")
"""What becomes of a ViT's class token."""
NAME = "linear_vit"
"""Of the model in timm's registry."""
INNER = ".attn.inner."
"""In the names of an inner model's tensors."""


class LinearBlock(nn.Module):
    """A block of a ViT on tokens x [B, N, D], with another layer in the place of its attention::

        x ← x + LayerScale(TTTAttention(LN(x)))
        x ← x + LayerScale(MLP(LN(x)))

    Args:
        block: one of timm's, whose other parts this one takes over.
        inner: as of :class:`vision_ttt.layers.TTTAttention`.
    """

    def __init__(self, block: nn.Module, inner: str) -> None:
        super().__init__()
        self.norm1, self.norm2, self.mlp = block.norm1, block.norm2, block.mlp
        self.attn = ttt_attention(block.attn, inner)
        self.proj_drop = block.attn.proj_drop
        self.ls1, self.ls2 = layer_scale(block, 1), layer_scale(block, 2)
        self.drop_path1, self.drop_path2 = block.drop_path1, block.drop_path2

    def forward(
        self,
        x: Tensor,
        grid: tuple[int, int],
        extra: tuple[int, ...] = (),
        rotations: Tensor | None = None,
    ) -> Tensor:
        """Run the block; the arguments are those of :class:`vision_ttt.layers.TTTAttention`.

        Raises:
            ValueError: N does not fit the grid.
        """
        mixed = self.proj_drop(self.attn(normalised(self.norm1, x), grid, extra, rotations))
        x = x + self.drop_path1(self.ls1(mixed))
        return x + self.drop_path2(self.ls2(self.mlp(normalised(self.norm2, x))))


class LinearViT(PlainBackbone):
    """A ViT whose attention became test-time training: images [B, C, H, W] → logits.

    "Linearizing Vision Transformers with Test-Time Training" (arXiv 2605.02772). All but the
    attention is the ViT's own; cost and memory are linear in the number of tokens, and images of
    any size are accepted. :func:`vision_ttt.linearize` makes one with a ViT's weights.

    Args:
        vit: one of timm's plain ViTs, whose parts this model takes over.
        inner: as of :class:`vision_ttt.layers.TTTAttention`.
        class_token: "drop": there is no class token, and where the ViT has pooled it, the image
            tokens are averaged. "keep": it is one of the tokens, and pooled as in the ViT.
            Registers are among the tokens in both.

    Raises:
        TypeError: ``vit`` is no module.
        ValueError: its architecture is another, an argument is not accepted, or a class token is to
            be kept and there is none.
    """

    inheritance: tuple[tuple[str, ...], ...] | None = None
    """Of a model that :func:`vision_ttt.linearize` has made, what is inherited, new, without place:
    a :class:`vision_ttt.models.Inheritance`."""

    def __init__(self, vit: nn.Module, inner: str = "swiglu", class_token: str = "drop") -> None:
        check_vit(vit)
        keeps = choose("class_token", class_token, CLASS_TOKEN) == "keep"
        has_token = vit.cls_token is not None
        if keeps and not has_token:
            raise ValueError("class_token is 'keep', and the ViT has none; accepted: 'drop'")
        count = vit.num_prefix_tokens - (has_token and not keeps)
        tokens = ExtraTokens(vit.embed_dim, "head", count) if count else None
        positions, embeds_prefix = vit.pos_embed, not vit.no_embed_class
        if positions is not None:
            patches = vit.patch_embed.num_patches
            positions = nn.Parameter(positions.detach()[:, -patches:].clone())
        pool = "avg" if vit.global_pool == "token" and not keeps else vit.global_pool
        super().__init__(
            patch_embed=vit.patch_embed,
            blocks=[LinearBlock(block, inner) for block in vit.blocks],
            norm=vit.norm,
            head=vit.head,
            pos_embed=positions,
            class_tokens=None if tokens is None else tokens.to(vit.patch_embed.proj.weight),
            own_pools=("token",) if keeps else (),
            global_pool=pool,
            dynamic_img_size=True,
            drop_rate=vit.head_drop.p,
        )
        self.keeps_class_token, self.embeds_prefix = keeps, embeds_prefix
        self.pos_drop, self.norm_pre, self.fc_norm = vit.pos_drop, vit.norm_pre, vit.fc_norm
        self.rope = rotary_embedding(getattr(vit, "rope", None))
        if self.rope is not None:
            self.blocks.own_context = None

    @property
    def arguments(self) -> dict[str, Any] | None:
        """What ``timm.create_model("linear_vit", …)`` needs to build the model again.

        After ``reset_classifier`` and ``set_input_size`` it is the model as it is then. None unless
        ``timm.create_model`` has built the model, or :func:`vision_ttt.linearize` has made it of a
        ViT that ``timm.create_model`` has built.
        """
        given = getattr(self, "_model_args", {})
        return {**given, **get_model_args(self)} if "base" in given else None

    def new_parameters(self) -> set[str]:
        """The names of the parameters that a ViT has no weights for: those of the inner models."""
        return {name for name, _ in self.named_parameters() if INNER in name}

    def can_inherit(self, weights: Mapping[str, Tensor]) -> bool:
        """Whether weights are a ViT's, rather than this model's: they have no inner model."""
        return not any(INNER in name for name in weights)

    def inherited(self, weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
        """A ViT's weights under the names that they have here, and the names of those without.

        Raises:
            ValueError: tensors that become one do not fit each other.
        """
        keeps, embeds = self.keeps_class_token, self.embeds_prefix
        try:
            named, left = inherited_weights(weights, keeps_class_token=keeps, embeds_prefix=embeds)
        except (IndexError, RuntimeError, TypeError) as error:  # those of torch.cat and slices
            raise ValueError(f"these are not the weights of a whole ViT: {error}") from error
        own = self.state_dict()
        left += [key for key in named if key not in own]
        return {key: named[key] for key in named if key in own}, left

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Layer groups for layer decay: stem, each block, the final norms."""
        groups = super().group_matcher(coarse)
        return {**groups, "stem": rf"{groups['stem']}|^norm_pre"}

    def place(self, x: Tensor, grid: tuple[int, int]) -> tuple[Tensor, tuple[Any, ...]]:
        """The first block's input of patches [B, T, D]; see :meth:`PlainBackbone.place`.

        Returns:
            Tokens [B, N, D], and the blocks' other arguments: the grid, the positions of the tokens
            outside of it, and the rotations or None.
        """
        x, (grid, *extra) = super().place(x, grid)
        rotations = None if self.rope is None else self.rope.get_embed(shape=list(grid))
        return self.norm_pre(self.pos_drop(x)), (grid, extra[0] if extra else (), rotations)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove what :meth:`forward_intermediates` with these indices does not need."""
        taken = super().prune_intermediate_layers(indices, prune_norm, prune_head)
        if prune_head:
            self.fc_norm = nn.Identity()
        return taken

    def pool(self, x: Tensor) -> Tensor:
        """The classification feature [B, D] of tokens [B, N, D]; for ``global_pool=""`` x."""
        pooled = x[:, 0] if self.global_pool == "token" else super().pool(x)
        return self.fc_norm(pooled)


default_cfgs = generate_default_cfgs({NAME: pretrained_cfg(224, fixed=True)})


@register_model
def linear_vit(
    pretrained: bool = False,
    base: str = "deit_tiny_patch16_224",
    inner: str = "swiglu",
    class_token: str = "drop",
    **kwargs: Any,
) -> LinearViT:
    """A ViT of timm, by name, with test-time training in the place of its attention.

    Args:
        pretrained: load weights that ``pretrained_cfg_overlay`` names.
        base: name of the ViT, e.g. "deit_tiny_patch16_224"; with the tag of weights, such as
            ".fb_in1k", images are normalised as these expect. None are loaded.
        inner, class_token: as of :class:`LinearViT`.
        kwargs: arguments of the ViT or of timm.

    Raises:
        TypeError, ValueError: an argument is unknown or not accepted, or ``base`` is no plain ViT.
    """
    if not isinstance(base, str) or ":" in base or not timm.is_model(base):
        raise ValueError(f"base must be the name of one of timm's ViTs, got {base!r}")
    if not timm.model_entrypoint(base).__module__.startswith("timm."):
        raise ValueError(f"base must be one of timm's ViTs; {base} is none")
    described = get_pretrained_cfg(base)
    own = {} if described is None else {key: getattr(described, key) for key in _DESCRIBED}

    def make(**arguments: Any) -> LinearViT:
        vit = timm.create_model(base, **arguments)
        model = LinearViT(vit, inner, class_token)
        update_model_args(model, base=base, **norm_argument(vit))
        return model

    if kwargs.get("pretrained_cfg") is None:
        side = own.get("input_size", (3, 224, 224))[-1]
        kwargs["pretrained_cfg"] = {**pretrained_cfg(side, fixed=True), **own}
    kwargs.setdefault("feature_cfg", feature_cfg(kwargs.get("depth", 12)))
    return build_model(make, NAME, pretrained, pretrained_filter_fn=pretrained_filter_fn, **kwargs)


_DESCRIBED = ("num_classes", "input_size", "mean", "std", "crop_pct", "interpolation", "crop_mode")
"""What the base's description says of its images."""
