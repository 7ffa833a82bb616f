"""The measured models: timm names with a kind of modules or a runtime."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

import timm
import torch
from torch import nn

from vision_ttt.acceleration import COMPOSITES, for_training
from vision_ttt.bench.names import RUNTIMES
from vision_ttt.engine.building import build_model
from vision_ttt.errors import UserError, suggestions
from vision_ttt.models import is_model
from vision_ttt.tasks.images.models import model_arguments

NUM_CLASSES = 1000
"""The classes of every measured model."""

SIZES = frozenset(("nano", "tiny", "small", "base", "large", "huge"))
"""The words for a model's size in timm's names."""

ATTENTION = {"fused attention": True, "plain attention": False}
"""Kind of attention → whether torch's fused kernel computes it."""

COMPOSITE = "for_training"
"""The kind of a model that runs by composite ops, as the recipes train it."""

_LABEL = re.compile(r"(.*?)(?::([^ ]*))?(?: \(([^)]*)\))?", re.DOTALL)


@dataclass(frozen=True)
class Contender:
    """A model that runs as modules or is deployed by a runtime."""

    name: str
    """timm's name of the model."""
    kind: str | None = None
    """The kind of the modules. A key of ATTENTION for modules with attention; COMPOSITE for those
    of :func:`vision_ttt.for_training`; None for modules of a single kind."""
    runtime: str | None = None
    """A key of RUNTIMES; None for the modules."""

    @property
    def label(self) -> str:
        """The name in rows, tables and figures.

        E.g. "deit_tiny_patch16_224 (plain attention)", "deit_tiny_patch16_224:openvino",
        "vittt_tiny_patch16_224 (for_training)".
        """
        if self.runtime is not None:
            return f"{self.name}:{self.runtime}"
        return self.name if self.kind is None else f"{self.name} ({self.kind})"

    @property
    def fuses_attention(self) -> bool:
        """Whether its label promises a fused attention kernel."""
        return ATTENTION.get(self.kind, False)

    def build(self, resolution: int | None) -> nn.Module:
        """Build the model with random weights.

        Args:
            resolution: pixels along a side of its images; None for a model of images of any size,
                without a head.

        Raises:
            ConfigError: the model is unknown or cannot be built for that size, or for any.
        """
        if resolution is None:
            arguments = {"num_classes": 0, "dynamic_img_size": True}
        else:
            arguments = model_arguments(self.name, num_classes=NUM_CLASSES, image_size=resolution)
        model = build_model(self.name, arguments)
        if self.kind == COMPOSITE:
            return for_training(model, strict=True)
        if self.kind in ATTENTION:
            for module in _attentions(model):
                module.fused_attn = ATTENTION[self.kind]
        return model


def find_contenders(names: Iterable[str]) -> list[Contender]:
    """List the contenders called `names`.

    Args:
        names: timm names or labels. A timm name stands for the modules with every kind of attention
            that the model has, a label for one contender.

    Raises:
        UserError: a model or runtime is unknown, or the model's modules have no such kind. The
            message has the nearest name.
    """
    found = []
    for given in names:
        name, runtime, kind = _LABEL.fullmatch(given).groups()
        if is_model(name) and not timm.is_model(name):
            raise UserError(f"{name!r} denoises images; only models that classify are measured")
        if not timm.is_model(name):
            raise UserError(f"unknown model {name!r}; {suggestions(name, timm.list_models())}")
        if runtime is not None and runtime not in RUNTIMES:
            raise UserError(f"unknown runtime {runtime!r}; accepted: {', '.join(RUNTIMES)}")
        with torch.device("meta"):  # only the model's structure is needed
            model = timm.create_model(name)
        kinds = list(ATTENTION) if _attentions(model) else [None]
        if kind is None:
            chosen = kinds if runtime is None else [None]
        else:
            kinds += [COMPOSITE] if _has_composite_blocks(name) else []
            if runtime is not None or kind not in kinds:
                labels = [Contender(name, each).label for each in kinds]
                labels += [Contender(name, runtime=each).label for each in RUNTIMES]
                raise UserError(f"unknown contender {given!r}; accepted: {', '.join(labels)}")
            chosen = [kind]
        found += [Contender(name, each, runtime) for each in chosen]
    return list(dict.fromkeys(found))


def is_ours(label: str) -> bool:
    """Whether a contender's model is one of this package."""
    name = _LABEL.fullmatch(label)[1]
    return timm.is_model(name) and timm.model_entrypoint(name).__module__.startswith("vision_ttt.")


def size_of(label: str) -> set[str]:
    """The words for the model's size in a contender's label."""
    return SIZES.intersection(re.split(r"\W|_", label))


@functools.cache
def _has_composite_blocks(name: str) -> bool:
    """Whether blocks of a model, and not only its linear layers, run by composite ops."""
    with torch.device("meta"):
        model = for_training(timm.create_model(name))
    return any(isinstance(module, COMPOSITES) for module in model.modules())


def _attentions(model: nn.Module) -> list[nn.Module]:
    """The attention layers that support both kinds of attention."""
    return [module for module in model.modules() if hasattr(module, "fused_attn")]
