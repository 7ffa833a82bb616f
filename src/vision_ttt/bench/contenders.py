"""Who is measured: models by their timm names, and by kind of attention where they have it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import timm
import torch
from torch import nn

from vision_ttt.engine.building import build_model, model_arguments
from vision_ttt.errors import UserError, nearest
from vision_ttt.models import is_model

NUM_CLASSES = 1000

SIZES = frozenset(("nano", "tiny", "small", "base", "large", "huge"))

ATTENTION = {"fused attention": True, "plain attention": False}


@dataclass(frozen=True)
class Contender:
    """A model, and for models with attention whether torch's fused kernel computes it."""

    name: str
    """timm's."""
    attention: str | None = None
    """A key of ATTENTION."""

    @property
    def label(self) -> str:
        """The name in rows, tables and figures, e.g. "deit_tiny_patch16_224 (plain attention)"."""
        return self.name if self.attention is None else f"{self.name} ({self.attention})"

    @property
    def fused(self) -> bool:
        """Whether its label promises a fused attention kernel."""
        return self.attention is not None and ATTENTION[self.attention]

    def build(self, resolution: int) -> nn.Module:
        """Build the model for images of `resolution` pixels along a side, with random weights.

        Raises:
            ConfigError: the model is unknown or cannot be built for that size.
        """
        arguments = model_arguments(self.name, num_classes=NUM_CLASSES, image_size=resolution)
        model = build_model(self.name, arguments)
        if self.attention is not None:
            for module in _attentions(model):
                module.fused_attn = ATTENTION[self.attention]
        return model


def find_contenders(names: Iterable[str]) -> list[Contender]:
    """List the contenders called `names`.

    Args:
        names: timm names, which stand for every kind of attention that the model has, or labels,
            which stand for one.

    Raises:
        UserError: a model is unknown or has no such attention; the message names the nearest.
    """
    found = []
    for given in names:
        name, attention = re.fullmatch(r"(.*?)(?: \(([^)]*)\))?", given, re.DOTALL).groups()
        if is_model(name) and not timm.is_model(name):
            raise UserError(f"{name!r} denoises images; models that classify them are measured")
        if not timm.is_model(name):
            raise UserError(f"unknown model {name!r}; nearest: {nearest(name, timm.list_models())}")
        with torch.device("meta"):  # its structure is wanted, not its weights
            model = timm.create_model(name)
        kinds = list(ATTENTION) if _attentions(model) else [None]
        if attention is not None and attention not in kinds:
            labels = [Contender(name, kind).label for kind in kinds]
            raise UserError(f"{given!r} is no contender; accepted: {', '.join(labels)}")
        found += [Contender(name, kind) for kind in kinds if attention in (None, kind)]
    return list(dict.fromkeys(found))


def registered(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Part names into those that timm knows and those that it does not."""
    names = list(names)
    known = [name for name in names if timm.is_model(name)]
    return known, [name for name in names if name not in known]


def default_baseline(label: str, labels: Iterable[str]) -> str:
    """What a contender is compared with among others unless it is named.

    `dual` for backends; for models the first with fused attention of the same size (DeiT-S for
    Vittt-S), else the first with fused attention of any, else the first.
    """
    labels = list(labels)
    fused = [other for other in labels if "fused attention" in other]
    of_its_size = [other for other in fused if _size(other) == _size(label)]
    return "dual" if "dual" in labels else (of_its_size or fused or labels)[0]


def _size(label: str) -> set[str]:
    """The words for the size in a model's name."""
    return SIZES.intersection(re.split(r"\W|_", label))


def _attentions(model: nn.Module) -> list[nn.Module]:
    """The attention layers that can be computed in both ways."""
    return [module for module in model.modules() if hasattr(module, "fused_attn")]
