"""The releases of ViT³ and H-ViT³, which share the names of a block's parts."""

from __future__ import annotations

import re
from functools import partial

import torch
from torch import Tensor

from vision_ttt.convert.family import ConversionError, Family, number_of_classes
from vision_ttt.dense.stage_maps import StageMaps
from vision_ttt.layers.rotary2d import rotary_table
from vision_ttt.models.h_vit3 import HViT3
from vision_ttt.models.vit3 import ViT3

_DOWNSAMPLE = {
    "expand": "conv.0.conv",
    "spatial": "conv.1.conv",
    "reduce": "conv.2.conv",
    "norm": "conv.2.norm",
}


def _vit3_name(key: str) -> str:
    return key.replace(".ttt.", ".attn.")


def _h_vit3_name(key: str) -> str:
    key = re.sub(r"^stem\.", "patch_embed.conv.", _vit3_name(key)).replace(
        ".mlp.conv.", ".mlp.dwc."
    )
    downsample = re.fullmatch(r"stages\.(\d+)\.downsample\.(\w+)\.(\w+)", key)
    if downsample is None:
        return re.sub(r"^stages\.", "layers.", key)
    stage, part, leaf = downsample.groups()  # it ends a stage there and begins the next one here
    return f"layers.{int(stage) - 1}.downsample.{_DOWNSAMPLE[part]}.{leaf}"


def _maps_name(key: str) -> str:
    """Name of a map module's tensor in the release of a detector or segmenter."""
    if (backbone := key.removeprefix("backbone.")) != key:
        return f"backbone.{_h_vit3_name(backbone)}"
    return re.sub(r"^norms\.(\d+)", r"backbone.norm\1", key)


def _is_rotation(key: str, value: Tensor) -> bool:
    """Whether it is a table [h, w, D / 2, 2] of RoPE, which the model computes for any size."""
    if not key.endswith(".rope.rotations") or value.ndim != 4:
        return False
    height, width, pairs, parts = value.shape
    if parts != 2 or pairs % 2:
        return False
    computed = rotary_table((height, width), 2 * pairs).view_as(value)
    if not torch.allclose(value.float(), computed, atol=1e-3):
        raise ConversionError(f"{key} is not the table of 2-D RoPE that H-ViT³ computes")
    return True


_arguments = partial(number_of_classes, head="head.weight")

VIT3 = Family(
    "ViT³",
    ViT3,
    frozenset({"patch_embed.proj.weight", "blocks.0.attn.w3"}),
    _vit3_name,
    arguments=_arguments,
)
H_VIT3 = Family(
    "H-ViT³",
    HViT3,
    frozenset({"layers.0.blocks.0.attn.w3"}),
    _h_vit3_name,
    _is_rotation,
    _arguments,
)
# Maps of odd sides are padded by a row or column before they are halved there, here by zeros within
# the convolution: borders differ then. Images whose sides are multiples of 32 have no such maps.
H_VIT3_MAPS = Family(
    "H-ViT³ with a norm per map",
    StageMaps,
    frozenset({"backbone.layers.0.blocks.0.attn.w3", "backbone.norm0.weight"}),
    _maps_name,
    _is_rotation,
    other_parts=("neck.", "rpn_head.", "roi_head.", "decode_head.", "auxiliary_head."),
)
