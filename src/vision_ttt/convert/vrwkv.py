"""The release of Vision-RWKV's classifiers, with the names of mmcls."""

from __future__ import annotations

import re
from functools import partial

from vision_ttt.convert.family import Family, number_of_classes
from vision_ttt.models.vrwkv import VRWKV as Model

_BLOCK = {
    "norm": "ln",
    "scale": "gamma",
    "spatial_mix.decay": "att.spatial_decay",
    "spatial_mix.bonus": "att.spatial_first",
    "spatial_mix.mix_": "att.spatial_mix_",
    "spatial_mix.": "att.",
    "channel_mix.mix_": "ffn.spatial_mix_",
    "channel_mix.": "ffn.",
}
"""Beginnings of the names within a block; the first that fits counts."""


def _name(key: str) -> str:
    if key.startswith("head."):
        return key.replace("head.", "head.fc.")
    if block := re.fullmatch(r"blocks\.(\d+)\.(.+)", key):
        index, part = block.groups()
        ours = next(each for each in _BLOCK if part.startswith(each))
        return f"backbone.layers.{index}.{_BLOCK[ours]}{part.removeprefix(ours)}"
    key = key.replace("patch_embed.proj.", "patch_embed.projection.")
    return "backbone." + re.sub(r"^norm\.", "ln1.", key)


VRWKV = Family(
    "Vision-RWKV",
    Model,
    frozenset({"backbone.layers.0.att.spatial_decay", "head.fc.weight"}),
    _name,
    arguments=partial(number_of_classes, head="head.fc.weight"),
)
