"""How the blocks of any plain backbone are run: one contract for ours and for timm's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from timm.models import VisionTransformer, checkpoint
from torch import Tensor, nn

from vision_ttt.models.overlapping_patches import OverlappingPatchEmbed
from vision_ttt.models.plain_backbone import PlainBackbone
from vision_ttt.models.registry import create_model

STRIDES = (4, 8, 16, 32)
"""Pixels per cell of the four maps."""


class PlainEncoder(Protocol):
    """A plain backbone, run group of blocks by group of blocks.

    :class:`vision_ttt.models.plain_backbone.PlainBackbone` documents the methods. A sequence has N
    tokens: T of the image, row by row, and others.
    """

    def embed(self, x: Tensor) -> tuple[Tensor, tuple[Any, ...]]: ...

    def run_blocks(
        self, x: Tensor, context: tuple[Any, ...], start: int = 0, stop: int | None = None
    ) -> Tensor: ...

    def split_tokens(self, x: Tensor) -> tuple[Tensor, Tensor | None]: ...

    def join_tokens(self, image: Tensor, others: Tensor | None) -> Tensor: ...


class VisionTransformerEncoder:
    """timm's VisionTransformer, of which DeiT is one, as a :class:`PlainEncoder`.

    It holds no parameters: the model's keep their names.

    Args:
        model: with ``dynamic_img_size``.
    """

    def __init__(self, model: VisionTransformer) -> None:
        self.model = model

    def embed(self, x: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
        """Tokens [B, N, D] of images [B, C, H, W]; the blocks take no other arguments."""
        model = self.model
        return model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(x)))), ()

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


def as_encoder(backbone: nn.Module) -> PlainEncoder:
    """A plain backbone by the contract.

    Raises:
        TypeError: the model is of a family that has no such form.
    """
    if isinstance(backbone, PlainBackbone):
        return backbone
    if isinstance(backbone, VisionTransformer):
        return VisionTransformerEncoder(backbone)
    raise TypeError(
        "the backbone must be plain: a PlainBackbone (Vittt, ViT³, Vim, Mamba-Reg, Vision-RWKV) or"
        f" timm's VisionTransformer (DeiT, ViT), got {type(backbone).__name__}"
    )


def headless(backbone: str | nn.Module) -> nn.Module:
    """A plain backbone without its final norm and head.

    Args:
        backbone: a model, which is changed, or the name of one, built with random weights.

    Raises:
        RuntimeError: no model has this name.
        TypeError: the model is not plain.
        ValueError: it accepts images of one size only, or its patches overlap.
    """
    if isinstance(backbone, str):
        backbone = create_model(backbone, num_classes=0, dynamic_img_size=True)
    as_encoder(backbone)
    if not backbone.dynamic_img_size:
        raise ValueError(
            f"this {type(backbone).__name__} accepts images of one size; make it with"
            " dynamic_img_size=True"
        )
    if isinstance(backbone.patch_embed, OverlappingPatchEmbed):
        raise ValueError(
            f"this {type(backbone).__name__}'s patches overlap; make it without stride"
        )
    backbone.prune_intermediate_layers([len(backbone.blocks) - 1], prune_norm=True)
    return backbone


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
