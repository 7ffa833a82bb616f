"""Building models through timm, on a chosen device and in a chosen precision."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from timm.models import build_model_with_cfg, resolve_pretrained_cfg
from torch import nn

from vision_ttt.pretrained import pretrained_of


def build_model(
    model_class: Callable[..., nn.Module],
    name: str,
    pretrained: bool,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **arguments: Any,
) -> Any:
    """A model by timm's ``build_model_with_cfg``.

    Args:
        model_class: the class, or a function that returns a model.
        name: of the model in timm's registry.
        pretrained: load weights.
        device, dtype: of the parameters and buffers, as in timm's constructors.
        arguments: the constructor's and timm's own.

    Raises:
        TypeError: an argument is unknown.
        RuntimeError: weights are asked for, and no tag says which; names the tags.
    """
    if pretrained:
        _check_weights(name, **arguments)

    def make(**constructor_arguments: Any) -> nn.Module:
        with nullcontext() if device is None else torch.device(device):
            model = model_class(**constructor_arguments)
        return model if dtype is None else model.to(dtype)

    return build_model_with_cfg(make, name, pretrained, **arguments)


def _check_weights(
    name: str, pretrained_cfg: Any = None, pretrained_cfg_overlay: Any = None, **_: Any
) -> None:
    """Raise RuntimeError where no weights are chosen, though some are packaged by a tag."""
    chosen = resolve_pretrained_cfg(name, pretrained_cfg, pretrained_cfg_overlay)
    tagged = pretrained_of(name)
    if tagged and not (chosen.has_weights or chosen.state_dict):
        raise RuntimeError(
            f"the weights of {name} have tags, but no tag is given; accepted: {', '.join(tagged)}"
        )


def feature_cfg(blocks: int, most: int = 3) -> dict[str, Any]:
    """timm's settings of ``features_only``: maps after the last ``most`` blocks, or after all."""
    return {"out_indices": min(most, blocks), "feature_cls": "getter"}


def pretrained_cfg(image_size: int, *, fixed: bool, **others: Any) -> dict[str, Any]:
    """timm's description of a classifier's input, without weights.

    Args:
        image_size: pixels along a side.
        fixed: whether the weights depend on the image size.
        others: entries that differ in a family.
    """
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, image_size, image_size),
        "pool_size": None,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "fixed_input_size": fixed,
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        "license": "apache-2.0",
        **others,
    }
