"""A backbone inside a model that pre-trains it, whose weights start the models of other tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from vision_ttt.engine.building import build_model
from vision_ttt.engine.config import ConfigError
from vision_ttt.engine.initial_weights import start_from
from vision_ttt.models.plain_backbone import PlainBackbone

_AFTER_NORM = ("head", "neck", "fc_norm")
"""Parts of a backbone that its tokens do not depend on."""


class PretrainedBackbone(nn.Module):
    """A plain backbone with the parts that its pre-training needs.

    Its weights, named `backbone.…`, are whole for other tasks: what the backbone has behind its
    final norm takes no part and is frozen.

    Args:
        backbone: of any number of classes.

    Raises:
        TypeError: it is not plain.
    """

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        if not isinstance(backbone, PlainBackbone):
            raise TypeError(
                f"{type(backbone).__name__} is not a plain backbone of this package: vittt_*,"
                " vit3_*, vim_*, mambar_*, vrwkv_* or linear_vit"
            )
        for name in _AFTER_NORM:
            if (part := getattr(backbone, name, None)) is not None:
                part.requires_grad_(False)
        self.backbone = backbone
        self.pretrained_cfg = backbone.pretrained_cfg

    @property
    def blocks(self) -> nn.ModuleList:
        """The backbone's, which are sharded one by one."""
        return self.backbone.blocks

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Trade compute for memory: keep only each block's input for the backward pass."""
        self.backbone.set_grad_checkpointing(enable)

    def no_weight_decay(self) -> set[str]:
        """The backbone's parameters without weight decay."""
        return {f"backbone.{name}" for name in self.backbone.no_weight_decay()}


def build_pretrained(
    make: Callable[[nn.Module], nn.Module], name: str, arguments: Mapping[str, Any]
) -> nn.Module:
    """Make a model of a backbone, built as timm's model `name`.

    Raises:
        ConfigError: there is no such model, it does not accept the arguments or is not plain.
    """
    backbone = build_model(name, arguments)
    try:
        return make(backbone)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model {name}: {error}") from error


def start_backbone(
    path: Path, model: PretrainedBackbone, name: str, model_args: Mapping[str, Any]
) -> str:
    """Start the backbone from weights of any task; see :meth:`Task.start_from`.

    The other parts, a mask token among them, stay as they are.
    """
    backbone = model.backbone
    token, backbone.mask_token = backbone.mask_token, None
    try:
        return start_from(path, backbone, name, model_args)
    finally:
        backbone.mask_token = token
