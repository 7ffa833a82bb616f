"""What a plain backbone does with a batch of images of any shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vision_ttt.models.classifier import Classifier
from vision_ttt.models.naflex import Group, NaFlexBatch, flat_patches

if TYPE_CHECKING:
    from vision_ttt.models.plain_backbone import PlainBackbone


def embed_naflex(
    model: PlainBackbone, batch: Mapping[str, Any]
) -> tuple[Tensor, tuple[NaFlexBatch]]:
    """The first block's input: the tokens of all images [1, S, D], and the batch with its groups.

    Raises:
        TypeError, ValueError: the batch does not fit the model, or an export is under way.
    """
    if torch.compiler.is_exporting():
        raise ValueError("a batch of images of any shapes cannot be exported; export images")
    patch, own = model.patch_embed.patch_size, tuple(model.patch_embed.grid_size)
    if model.patch_embed.proj.stride != patch:
        raise ValueError("this model's patches overlap; it accepts images, and no patches")
    images = NaFlexBatch(batch)
    patches = flat_patches(batch, patch, model.in_chans)
    placed, groups = [], []
    # One image with one row of patches: by far the fastest form that the layer accepts.
    x = images.gather(patches).unflatten(-1, (*patch, model.in_chans))  # [1, S, P, P, C]
    x = model.patch_embed.proj(x.permute(0, 4, 2, 1, 3).flatten(3))  # [1, D, 1, S]
    x = x.flatten(2).transpose(1, 2).contiguous()
    for part, (count, _, (grid,)) in zip(images.split(x), images.groups, strict=True):
        if not model.dynamic_img_size and grid != own:
            raise ValueError(
                f"an image has {grid[0]} × {grid[1]} patches, the model was made for {own[0]} ×"
                f" {own[1]}; make it with dynamic_img_size=True for changing sizes"
            )
        tokens, context = model.place(part, grid)
        placed.append(tokens.flatten(0, 1))
        groups.append(Group(count, tokens.shape[1], context))
    return torch.cat(placed).unsqueeze(0), (images.with_context(groups),)


def naflex_features(model: PlainBackbone, x: Tensor, images: NaFlexBatch) -> dict[str, Tensor]:
    """Tokens [1, S, D] as the dictionary that ``forward_features`` returns."""
    groups, others = zip(*(model.split_tokens(group) for group in images.split(x)), strict=True)
    features = {
        "patches": images.scatter(groups),
        "patch_coord": images.coord,
        "patch_valid": images.valid,
    }
    if model.class_tokens is not None:
        features["class_tokens"] = images.in_order(others)
    return features


def naflex_head(
    model: PlainBackbone, x: Mapping[str, Tensor], pre_logits: bool
) -> Tensor | dict[str, Tensor]:
    """Logits [B, num_classes] of that dictionary; for ``global_pool=""`` a dictionary of them.

    Raises:
        ValueError: the dictionary lacks the class tokens of a model that has them.
    """
    images = NaFlexBatch(x)
    groups = images.split(images.gather(x["patches"]))
    others = x.get("class_tokens")
    if model.class_tokens is not None and others is None:
        raise ValueError(f"class_tokens are missing; forward_features gave them: got {list(x)}")
    if model.global_pool == "":
        heads = [Classifier.forward_head(model, group, pre_logits) for group in groups]
        result = {**x, "patches": images.scatter(heads)}
        if others is not None:
            result["class_tokens"] = Classifier.forward_head(model, others, pre_logits)
        return result
    each = [None] * len(groups) if others is None else images.split_images(others)
    pooled = [model.pool(model.join_tokens(*parts)) for parts in zip(groups, each, strict=True)]
    y = model.head_drop(images.in_order(pooled))
    return y if pre_logits else model.head(y)
