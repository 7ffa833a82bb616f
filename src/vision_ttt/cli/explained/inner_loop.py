"""`vision-ttt explain inner-loss` and `fast-weights`: courses of layers along the tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import jsonargparse
import torch
from matplotlib.figure import Figure
from torch import Tensor

from vision_ttt.cli.explained.kind import (
    Kind,
    Part,
    Subject,
    file_name,
    head_names,
    mean_over_images,
)
from vision_ttt.engine.checkpoint import ModelMetadata
from vision_ttt.explain import fast_weights, inner_loss_course
from vision_ttt.explain.fast_weight_figures import fast_weight_heads, fast_weight_sheet
from vision_ttt.explain.inner_loss_figures import (
    inner_loss_comparison,
    inner_loss_course_figure,
    inner_loss_training_figure,
)

_SHORTEST_COURSE = 3  # checkpoints: two are a comparison


class InnerLoss(Kind):
    """Inner losses along the tokens; found: the layer's name → its course."""

    what = "inner-loss"

    def __init__(self, arguments: jsonargparse.Namespace) -> None:
        super().__init__(arguments)
        self.metadata: dict[str, ModelMetadata | None] = {}
        """The model's name → of its checkpoint."""

    def look(self, subject: Subject, images: Tensor) -> Mapping[str, Any]:
        return _some_layers(
            subject, inner_loss_course(subject.backbone.around, images, self.arguments.direction)
        )

    def gather(self, subject: Subject, parts: Sequence[Part]) -> dict[str, Any]:
        self.metadata[subject.name] = subject.metadata
        return _mean_layers(parts)

    def arrays(self, found: Mapping[str, Any]) -> dict[str, Tensor]:
        arrays = _arrays_of_layers(found)
        for model, metadata in self.metadata.items():
            if metadata is not None:
                arrays[f"{model}/epoch"] = torch.tensor(metadata.epoch, dtype=torch.int64)
                arrays[f"{model}/update"] = torch.tensor(metadata.update, dtype=torch.int64)
        return arrays

    def figures(self, found: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
        window = self.arguments.window
        for model, courses in found.items():
            figure = inner_loss_course_figure(courses, window=window, title=model)
            yield file_name(self.what, model), figure
        if len(found) > 1:
            yield self.what, inner_loss_comparison(found, window=window)
        unit = training_unit(list(self.metadata.values()))
        if unit is not None:
            checkpoints = {
                getattr(metadata, unit): found[model] for model, metadata in self.metadata.items()
            }
            figure = inner_loss_training_figure(checkpoints, unit=unit)
            yield f"{self.what}-training", figure


class FastWeightsAlong(Kind):
    """Fast weights along the image; found: the layer's name → drift, effective rank, rates."""

    what = "fast-weights"

    def look(self, subject: Subject, images: Tensor) -> Mapping[str, Any]:
        return _some_layers(subject, fast_weights(subject.backbone.around, images))

    def gather(self, subject: Subject, parts: Sequence[Part]) -> dict[str, Any]:
        layers = _mean_layers(parts)
        drift = next(iter(layers.values())).drift
        self.heads[subject.name] = head_names(subject, len(drift))
        return layers

    def arrays(self, found: Mapping[str, Any]) -> dict[str, Tensor]:
        return _arrays_of_layers(found)

    def figures(self, found: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
        yield self.what, fast_weight_sheet(found)
        if self.arguments.sheets:
            for model, layers in found.items():
                for quantity in ("drift", "effective_rank", "rates"):
                    figure = fast_weight_heads(
                        layers, quantity, heads=self.heads[model], title=model
                    )
                    yield file_name(self.what, quantity.replace("_", "-"), model), figure


def training_unit(checkpoints: Sequence[ModelMetadata | None]) -> Literal["epoch", "update"] | None:
    """The unit in which at least three checkpoints of one model ascend; None if they do not."""
    models = [each and (each.task, each.model, each.model_args, each.data) for each in checkpoints]
    if len(models) < _SHORTEST_COURSE or None in models or any(x != models[0] for x in models):
        return None
    for unit in ("epoch", "update"):
        trained = [getattr(each, unit) for each in checkpoints]
        if all(one < other for one, other in pairwise(trained)):
            return unit
    return None


def _some_layers(subject: Subject, layers: Mapping[str, Any]) -> Mapping[str, Any]:
    if not layers:
        raise TypeError(
            f"a {type(subject.backbone.model).__name__} has no TTT layers with linear or two-layer"
            " inner models; a Vittt has them"
        )
    return layers


def _mean_layers(parts: Sequence[Part]) -> dict[str, Any]:
    """The mean over images of what was found of each layer, named tuples of tensors."""
    weights = [len(batch.names) for batch, _ in parts]
    first = parts[0][1]
    return {
        layer: type(values)(
            *(
                mean_over_images([getattr(found[layer], name) for _, found in parts], weights)
                for name in values._fields
            )
        )
        for layer, values in first.items()
    }


def _arrays_of_layers(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    return {
        f"{model}/{layer}/{name}": values
        for model, layers in found.items()
        for layer, own in layers.items()
        for name, values in own._asdict().items()
    }
