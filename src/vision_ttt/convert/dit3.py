"""The release of DiT³."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vision_ttt.convert.family import ConversionError, Family, with_axes
from vision_ttt.layers.sincos2d import sincos_table
from vision_ttt.models.dit3 import DiT3

_PARTS = {
    "patch_embed.": "x_embedder.proj.",
    "time_embed.": "t_embedder.",
    "label_embed.table.": "y_embedder.embedding_table.",
    "head.": "final_layer.",
}


def _name(key: str) -> str:
    key = key.replace(".ttt.", ".attn.").replace(".modulation.", ".adaLN_modulation.")
    for ours, theirs in _PARTS.items():
        key = re.sub(f"^{re.escape(ours)}", theirs, key)
    return key


def _is_position_table(key: str, value: Tensor) -> bool:
    """Whether it is the table [1, T, D] of a square's positions, which the model computes."""
    if key != "pos_embed" or value.ndim != 3:
        return False
    side = math.isqrt(value.shape[1])
    fits = len(value) == 1 and side**2 == value.shape[1] and value.shape[2] % 4 == 0
    if not fits or not torch.allclose(
        value[0].float(), sincos_table((side, side), value.shape[2]), atol=1e-3
    ):
        raise ConversionError(f"{key} is not the table of sines and cosines that DiT³ computes")
    return True


def _arguments(released: Mapping[str, Tensor]) -> dict[str, Any]:
    """Constructor arguments that follow from the weights' shapes.

    The last vector of the table of classes stands for no class.
    """
    arguments: dict[str, Any] = {}
    patch = with_axes(released, "x_embedder.proj.weight", 4)
    if (table := with_axes(released, "y_embedder.embedding_table.weight", 2)) is not None:
        arguments["num_classes"] = len(table) - 1
    if patch is not None:
        arguments["in_chans"] = patch.shape[1]
        if (positions := with_axes(released, "pos_embed", 3)) is not None:
            arguments["img_size"] = math.isqrt(positions.shape[1]) * patch.shape[3]
        if (head := with_axes(released, "final_layer.linear.bias", 1)) is not None:
            arguments["learn_sigma"] = len(head) == 2 * patch[0].numel()
    return arguments


DIT3 = Family(
    "DiT³",
    DiT3,
    frozenset({"x_embedder.proj.weight", "final_layer.linear.weight", "blocks.0.attn.w3"}),
    _name,
    _is_position_table,
    _arguments,
    {"objective": "noise", "schedule": "linear", "steps": 1000},
)
