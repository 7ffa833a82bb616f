"""Plain backbones, ours and timm's: how their blocks are run, and a map of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.models import VisionTransformer, checkpoint
from torch import Tensor, nn

from vision_ttt.models.overlapping_patches import OverlappingPatchEmbed
from vision_ttt.models.plain_backbone import PlainBackbone
from vision_ttt.models.registry import create_model

STRIDES = (4, 8, 16, 32)
"""Pixels per cell of the four maps."""


class VisionTransformerEncoder:
    """timm's VisionTransformer, of which DeiT is one, with the methods of a `PlainBackbone`.

    A sequence has N tokens: T of the image, row by row, and others. The encoder holds no
    parameters: those of the model, made with ``dynamic_img_size``, keep their names.
    """

    def __init__(self, model: VisionTransformer) -> None:
        self.model = model

    def embed(self, x: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
        """Tokens [B, N, D] of images [B, C, H, W]; the blocks take no other arguments."""
        model = self.model
        return model.norm_pre(model._pos_embed(model.patch_embed(x))), ()

    def run_blocks(
        self, x: Tensor, context: tuple[Any, ...], start: int = 0, stop: int | None = None
    ) -> Tensor:
        """Tokens [B, N, D] after the blocks from ``start`` to before ``stop``."""
        for block in self.model.blocks[start:stop]:
            x = checkpoint(block, x) if self.model.grad_checkpointing else block(x)
        return x

    def split_tokens(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x [B, N, D] → the image tokens [B, T, D], and those before them or None."""
        count = self.model.num_prefix_tokens
        return (x[:, count:], x[:, :count]) if count else (x, None)

    def join_tokens(self, image: Tensor, others: Tensor | None) -> Tensor:
        """Undo :meth:`split_tokens`."""
        return image if others is None else torch.cat((others, image), dim=1)


def as_encoder(backbone: nn.Module) -> PlainBackbone | VisionTransformerEncoder:
    """A plain backbone, whose blocks are run group by group: ours, or timm's.

    Raises:
        TypeError: the model is of a family that has no such form.
    """
    if isinstance(backbone, PlainBackbone):
        return backbone
    if isinstance(backbone, VisionTransformer):
        return VisionTransformerEncoder(backbone)
    raise TypeError(_not_plain(type(backbone).__name__))


def _not_plain(received: str) -> str:
    return (
        "the backbone must be plain: a PlainBackbone (Vittt, ViT³, Vim, Mamba-Reg, Vision-RWKV, a"
        f" linearised ViT) or timm's VisionTransformer (DeiT, ViT), got {received}"
    )


def headless(backbone: str | nn.Module) -> nn.Module:
    """A plain backbone without its final norm and head.

    Args:
        backbone: a model, which is changed, or the name of one, built with random weights.

    Raises:
        RuntimeError, TypeError, ValueError: as :class:`TokenMap`, but any patches are accepted
            that do not overlap.
    """
    backbone = _plain(backbone)
    backbone.prune_intermediate_layers([len(backbone.blocks) - 1], prune_norm=True)
    return backbone


def _plain(backbone: str | nn.Module) -> nn.Module:
    if isinstance(backbone, str):
        try:
            backbone = create_model(backbone, num_classes=0, dynamic_img_size=True)
        except TypeError as error:  # other families have no dynamic_img_size
            raise TypeError(_not_plain(backbone)) from error
    as_encoder(backbone)
    name = type(backbone).__name__
    if not backbone.dynamic_img_size:
        raise ValueError(
            f"this {name} accepts images of one size; make it with dynamic_img_size=True"
        )
    if isinstance(backbone.patch_embed, OverlappingPatchEmbed):
        raise ValueError(f"this {name}'s patches overlap; make it without stride")
    ours = isinstance(backbone, PlainBackbone)
    rate = backbone.patch_drop_rate if ours else getattr(backbone.patch_drop, "prob", 0)
    if rate:
        raise ValueError(
            f"this {name}'s patch_drop_rate is {rate}; it must be 0, as maps are of every patch"
        )
    return backbone


class TokenMap(nn.Module):
    """Images [B, C, H, W] → one map [B, D, ⌈H / p⌉, ⌈W / p⌉] of a plain backbone's tokens.

    The tokens are those that the classifier pools, after the final norm. Nothing is added to the
    backbone: what a head on this map knows, the backbone has found out. Images are padded with
    zeros, right and bottom, to whole patches.

    Args:
        backbone: the name of a plain model, built with random weights, or the model itself, made
            with ``dynamic_img_size=True``. What it has behind its final norm is removed.

    Attributes:
        channels: (D,).
        strides: (p,), pixels along a patch's side.

    Raises:
        RuntimeError: no model has the backbone's name.
        TypeError: the backbone is not plain.
        ValueError: it accepts images of one size only, leaves patches out in training, or its
            patches overlap or are not square.
    """

    def __init__(self, backbone: str | nn.Module) -> None:
        super().__init__()
        backbone = _plain(backbone)
        height, width = backbone.patch_embed.patch_size
        if height != width:
            raise ValueError(
                f"this {type(backbone).__name__}'s patches are {height} × {width}; they must be"
                " square"
            )
        self.last = len(backbone.blocks) - 1
        backbone.prune_intermediate_layers([self.last])
        self.backbone = backbone
        self.channels = (backbone.embed_dim,)
        self.strides = (int(height),)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Trade compute for memory: keep only the inputs of the backbone's blocks."""
        self.backbone.set_grad_checkpointing(enable)

    def forward(self, images: Tensor) -> list[Tensor]:
        """The map, alone in a list."""
        (stride,) = self.strides
        down, across = (-side % stride for side in images.shape[-2:])
        if down or across:
            images = F.pad(images, (0, across, 0, down))
        return self.backbone.forward_intermediates(
            images, indices=[self.last], norm=True, output_fmt="NCHW", intermediates_only=True
        )


def block_groups(depth: int, last_blocks: Sequence[int] | None) -> list[tuple[int, int]]:
    """(first block, one past the last block) of each of the four groups.

    Args:
        depth: number of blocks.
        last_blocks: index of each group's last block; None divides the blocks evenly.

    Raises:
        ValueError: there are too few blocks, or the indices do not ascend to the last block.
    """
    count = len(STRIDES)
    if last_blocks is None:
        if depth < count:
            raise ValueError(f"the backbone has {depth} blocks; four maps need at least {count}")
        stops = [depth * (index + 1) // count for index in range(count)]
    else:
        stops = [index + 1 for index in last_blocks]
        ascending = all(a < b for a, b in zip([0, *stops], stops, strict=False))
        if len(stops) != count or not ascending or stops[-1] != depth:
            raise ValueError(
                f"interactions must be the {count} groups' last blocks, ascending up to"
                f" {depth - 1}, got {list(last_blocks)}"
            )
    return list(zip([0, *stops], stops, strict=False))
