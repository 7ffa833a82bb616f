"""What every way to look into a model is, to `vision-ttt explain`."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jsonargparse
from matplotlib.figure import Figure
from torch import Tensor

from vision_ttt.engine.checkpoint import ModelMetadata
from vision_ttt.layers import InnerLearner, ViT3TTT
from vision_ttt.layers.attention_inner import ViT3Inner
from vision_ttt.tasks.images.backbones import ImageBackbone

PAGE = 8
"""Pictures on a page of a sheet."""


class Subject(NamedTuple):
    """A model with the name that figures and arrays have for it."""

    name: str
    backbone: ImageBackbone
    metadata: ModelMetadata | None = None
    """The checkpoint's metadata, with update 0 before training; None for a model given by name."""


class Batch(NamedTuple):
    """Images of one shape."""

    names: list[str]
    images: Tensor
    """[B, 3, H, W], as the backbone is given them."""


Part = tuple[Batch, Any]
"""A batch on the CPU, and what was found on it."""


class Kind(ABC):
    """One way to look into models. `found` below is the model's name → what `gather` returned."""

    what: ClassVar[str]
    one_size: ClassVar[bool] = True
    """Whether a model's images must be of one size, because of means over them."""

    def __init__(self, arguments: jsonargparse.Namespace) -> None:
        self.arguments = arguments
        self.heads: dict[str, list[str]] = {}
        """The model's name → names of its heads."""

    @abstractmethod
    def look(self, subject: Subject, images: Tensor) -> Any:
        """Look into a model on a batch [B, 3, H, W] on its device.

        Raises:
            TypeError, ValueError: the model has nothing of the kind.
        """

    @abstractmethod
    def gather(self, subject: Subject, parts: Sequence[Part]) -> Any:
        """Put together what was found on the batches of a model."""

    @abstractmethod
    def arrays(self, found: Mapping[str, Any]) -> dict[str, Tensor]:
        """Everything that the figures show, by names in the .npz."""

    @abstractmethod
    def figures(self, found: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
        """Figures with the names of their files."""

    def lines(self, found: Mapping[str, Any]) -> Iterator[str]:
        """What to say on the terminal."""
        return iter(())


def head_names(subject: Subject, count: int) -> list[str]:
    """Names of a model's heads: by direction where it has two; the last one of ViT³ is its conv."""
    modules = list(subject.backbone.model.modules())
    learners = [x for x in modules if isinstance(x, InnerLearner)]
    if not learners:
        names = [f"head {index + 1}" for index in range(count)]
        convolves = any(isinstance(x, (ViT3TTT, ViT3Inner)) for x in modules)
        return [*names[:-1], "conv"] if convolves else names
    forward = learners[-1].num_heads
    return [
        f"→ head {index + 1}" if index < forward else f"← head {index - forward + 1}"
        for index in range(count)
    ]


def mean_over_images(values: Sequence[Tensor], weights: Sequence[int]) -> Tensor:
    """The mean of batches' means, each weighted by its number of images; summed in float64."""
    if len(values) == 1:
        return values[0]
    total = sum(x.double() * weight for x, weight in zip(values, weights, strict=True))
    return (total / sum(weights)).to(values[0].dtype)


def file_name(*parts: str) -> str:
    """A file's name of names of models and images, which may hold anything."""
    return "-".join(re.sub(r"[^\w.-]+", "-", part).strip("-.") or "x" for part in parts)
