"""The releases of Vim and Mamba-Reg, which keep the two directions of a layer apart."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from vision_ttt.convert.family import ConversionError, Family, number_of_classes, with_axes
from vision_ttt.layers import ExtraTokens
from vision_ttt.models.mamba_reg import MambaReg
from vision_ttt.models.vim import Vim

_DIRECTIONS = {
    "conv.weight": ("conv1d.weight", "conv1d_b.weight"),
    "conv.bias": ("conv1d.bias", "conv1d_b.bias"),
    "x_proj": ("x_proj.weight", "x_proj_b.weight"),
    "dt_proj": ("dt_proj.weight", "dt_proj_b.weight"),
    "dt_bias": ("dt_proj.bias", "dt_proj_b.bias"),
    "A_log": ("A_log", "A_b_log"),
    "D": ("D", "D_b"),
}
"""A layer's tensor → the release's of the forward and of the backward direction."""

_OTHERS = {
    "norm.weight": "norm_f.weight",
    "class_tokens.tokens": "cls_token",
    "class_tokens.pos_embed": "pos_embed_cls",
    "neck.reduce.weight": "neck.weight",
    "neck.norm.weight": "norm_neck.weight",
}


def _names(key: str) -> str | tuple[str, ...]:
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)", key)
    if block is None:
        return _OTHERS.get(key, key)
    index, part = block.groups()
    directions = _DIRECTIONS.get(part.removeprefix("mixer."))
    if directions is None:
        return f"layers.{index}.{part}"
    return tuple(f"layers.{index}.mixer.{name}" for name in directions)


def _with_own_positions(
    released: Mapping[str, Tensor], *, class_tokens: ExtraTokens | None
) -> Mapping[str, Tensor]:
    """Vim's weights with the class token's position under Mamba-Reg's name.

    Vim's position embedding [1, T + 1, D] is of the sequence with the class token in it, at the
    place that ``class_tokens`` of the model have. The weights themselves do not tell it.
    """
    positions = released.get("pos_embed")
    if (
        class_tokens is None
        or positions is None
        or positions.ndim != 3
        or positions.shape[1] < class_tokens.count
        or "cls_token" not in released
    ):
        return released
    image, own = class_tokens.extract(positions)
    return {**released, "pos_embed": image, "pos_embed_cls": own}


def _with_class_tokens_of(model: Vim) -> Family:
    prepared = partial(_with_own_positions, class_tokens=model.class_tokens)
    return VIM._replace(prepared=prepared)


def _arguments(released: Mapping[str, Tensor]) -> dict[str, Any]:
    """Constructor arguments that follow from the weights' shapes."""
    arguments = number_of_classes(released, "head.weight")
    patch = with_axes(released, "patch_embed.proj.weight", 4)
    positions = with_axes(released, "pos_embed", 3)
    if patch is not None:
        arguments["in_chans"] = patch.shape[1]
        if positions is not None:
            arguments["img_size"] = math.isqrt(positions.shape[1]) * patch.shape[3]
    return arguments


def _mamba_reg_arguments(released: Mapping[str, Tensor]) -> dict[str, Any]:
    arguments = _arguments(released)
    if (registers := with_axes(released, "cls_token", 3)) is not None:
        arguments["num_registers"] = registers.shape[1]
    arguments["head_reduction"] = 1
    if (neck := released.get("neck.weight")) is not None:
        if neck.ndim != 2 or not len(neck) or neck.shape[1] % len(neck):
            raise ConversionError(
                "head_reduction of a release must be a whole number: neck.weight must be [D / r, D]"
                f" with D a multiple of D / r, got {list(neck.shape)}"
            )
        arguments["head_reduction"] = neck.shape[1] // len(neck)
    return arguments


VIM = Family(
    "Vim",
    Vim,
    frozenset({"layers.0.mixer.A_b_log", "cls_token"}),
    _names,
    arguments=_arguments,
    lacks=frozenset({"pos_embed_cls"}),
    fitting=_with_class_tokens_of,
)
MAMBA_REG = Family(
    "Mamba-Reg",
    MambaReg,
    frozenset({"layers.0.mixer.A_b_log", "pos_embed_cls"}),
    _names,
    arguments=_mamba_reg_arguments,
)
