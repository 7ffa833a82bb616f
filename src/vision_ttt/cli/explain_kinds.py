"""What `vision-ttt explain` finds of each kind: numbers, figures and lines for the terminal."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jsonargparse
import torch
from matplotlib.figure import Figure
from torch import Tensor

from vision_ttt.engine.task import ImageBackbone
from vision_ttt.errors import UserError
from vision_ttt.explain import (
    anisotropy,
    energy_within,
    fast_weights,
    gradient_magnitude,
    inner_loss_course,
    mean_map,
    outlier_share,
    radial_profile,
    receptive_field,
    stage_norms,
    top_fraction,
)
from vision_ttt.explain.fast_weight_figures import fast_weight_heads, fast_weight_sheet
from vision_ttt.explain.field_figures import radial_profiles, receptive_field_sheet
from vision_ttt.explain.inner_loss_figures import inner_loss_comparison, inner_loss_course_figure
from vision_ttt.explain.map_sheets import PictureMap, head_sheet, layer_sheet, model_sheet
from vision_ttt.explain.norm_figures import norm_distributions, norm_map_sheet
from vision_ttt.layers import InnerLearner

_ROWS = 8
"""Pictures on a page of a sheet."""


class Subject(NamedTuple):
    """A model with the name that figures and arrays have for it."""

    name: str
    backbone: ImageBackbone


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


class GradientMap(Kind):
    """Gradient magnitude maps; found: the image's name → picture and magnitude."""

    what = "gradient-map"
    one_size = False

    def look(self, subject: Subject, images: Tensor) -> Tensor:
        state = self.arguments.state
        return gradient_magnitude(subject.backbone.around, images, state=state).cpu()

    def gather(self, subject: Subject, parts: Sequence[Part]) -> dict[str, tuple[Tensor, Tensor]]:
        found = {}
        for batch, magnitudes in parts:
            for name, image, magnitude in zip(*batch, magnitudes, strict=True):
                found[name] = subject.backbone.shown(image), magnitude
        layers = len(magnitude)
        if self.arguments.last_layers > layers:
            raise UserError(
                f"--last-layers is {self.arguments.last_layers}; {subject.name} has {layers}"
            )
        self.heads[subject.name] = head_names(subject, magnitude.shape[1])
        return found

    def arrays(self, found: Mapping[str, Any]) -> dict[str, Tensor]:
        arrays = {}
        for model, images in found.items():
            for image, (_, magnitude) in images.items():
                own = self._map(magnitude)
                place = f"{model}/{image}"
                arrays[f"{place}/magnitude"] = magnitude
                arrays[f"{place}/map"] = own
                arrays[f"{place}/top"] = top_fraction(own[None], self.arguments.fraction)[0]
        return arrays

    def figures(self, found: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
        images = list(next(iter(found.values())))
        for number, start in enumerate(range(0, len(images), _ROWS), start=1):
            shown = images[start : start + _ROWS]
            maps = {
                model: [PictureMap(own[name][0], self._map(own[name][1])) for name in shown]
                for model, own in found.items()
            }
            name = self.what if number == 1 else f"{self.what}-{number}"
            yield name, model_sheet(maps, shown, fraction=self.arguments.fraction)
        if not self.arguments.sheets:
            return
        for image in images:
            by_layer = {
                model: PictureMap(own[image][0], own[image][1].mean(1))
                for model, own in found.items()
            }
            yield _file(self.what, "layers", image), layer_sheet(by_layer, title=image)
            for model, own in found.items():
                picture, magnitude = own[image]
                title, heads = f"{model}, {image}", self.heads[model]
                figure = head_sheet(picture, magnitude, title=title, heads=heads)
                yield _file(self.what, "heads", model, image), figure

    def _map(self, magnitude: Tensor) -> Tensor:
        return mean_map(magnitude[None], self.arguments.last_layers)[0]


class ReceptiveField(Kind):
    """Effective receptive fields; found: the field [H, W]."""

    what = "receptive-field"

    def look(self, subject: Subject, images: Tensor) -> Tensor:
        return receptive_field(subject.backbone.model, images).cpu()

    def gather(self, subject: Subject, parts: Sequence[Part]) -> Tensor:
        weights = [len(batch.names) for batch, _ in parts]
        return _mean([field for _, field in parts], weights)

    def arrays(self, found: Mapping[str, Any]) -> dict[str, Tensor]:
        arrays = {}
        for model, field in found.items():
            arrays[f"{model}/field"] = field
            arrays[f"{model}/radial_profile"] = radial_profile(field)
            arrays[f"{model}/energy_within"] = torch.tensor(
                [self._radius(field), energy_within(field, self._radius(field))],
                dtype=torch.float64,
            )
            arrays[f"{model}/anisotropy"] = torch.tensor(anisotropy(field), dtype=torch.float64)
        return arrays

    def figures(self, found: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
        yield self.what, receptive_field_sheet(found, radius=self.arguments.radius)
        yield f"{self.what}-profile", radial_profiles(found)

    def lines(self, found: Mapping[str, Any]) -> Iterator[str]:
        for model, field in found.items():
            radius = self._radius(field)
            yield (
                f"{model}: {energy_within(field, radius):.1%} of the response within {radius:g}"
                f" pixels, anisotropy {anisotropy(field):.2f}"
            )

    def _radius(self, field: Tensor) -> float:
        return min(field.shape) / 4 if self.arguments.radius is None else self.arguments.radius


class InnerLoss(Kind):
    """Inner losses along the tokens; found: the layer's name → its course."""

    what = "inner-loss"

    def look(self, subject: Subject, images: Tensor) -> Mapping[str, Any]:
        return _some_layers(subject, inner_loss_course(subject.backbone.around, images))

    def gather(self, subject: Subject, parts: Sequence[Part]) -> dict[str, Any]:
        return _mean_layers(parts)

    def arrays(self, found: Mapping[str, Any]) -> dict[str, Tensor]:
        return _arrays_of_layers(found)

    def figures(self, found: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
        window = self.arguments.window
        for model, courses in found.items():
            figure = inner_loss_course_figure(courses, window=window, title=model)
            yield _file(self.what, model), figure
        if len(found) > 1:
            yield self.what, inner_loss_comparison(found, window=window)


class Norms(Kind):
    """Token norms; found: pictures [B, 3, H, W], and norms [B, layers, h, w] of each grid."""

    what = "norms"

    def look(self, subject: Subject, images: Tensor) -> list[Tensor]:
        return [norms.cpu() for norms in stage_norms(subject.backbone.model, images)]

    def gather(self, subject: Subject, parts: Sequence[Part]) -> tuple[list[str], Tensor, Any]:
        names = [name for batch, _ in parts for name in batch.names]
        shown = [subject.backbone.shown(image) for batch, _ in parts for image in batch.images]
        stages = [torch.cat(norms) for norms in zip(*(own for _, own in parts), strict=True)]
        return names, torch.stack(shown), stages

    def arrays(self, found: Mapping[str, Any]) -> dict[str, Tensor]:
        arrays = {}
        for model, (names, _, stages) in found.items():
            for stage, norms in enumerate(stages, start=1):
                key = "norms" if len(stages) == 1 else f"norms_stage_{stage}"
                for name, own in zip(names, norms, strict=True):
                    arrays[f"{model}/{name}/{key}"] = own
        return arrays

    def figures(self, found: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
        yield self.what, norm_distributions(self._by_grid(found))
        for model, (names, pictures, stages) in found.items():
            for stage, norms in enumerate(stages, start=1):
                own = (model,) if len(stages) == 1 else (model, f"stage-{stage}")
                for number, start in enumerate(range(0, len(names), _ROWS), start=1):
                    page = slice(start, start + _ROWS)
                    figure = norm_map_sheet(pictures[page], norms[page], names[page])
                    last = () if number == 1 else (str(number),)
                    yield _file(self.what, *own, *last), figure

    def lines(self, found: Mapping[str, Any]) -> Iterator[str]:
        for name, norms in self._by_grid(found).items():
            share = outlier_share(norms[:, -1]).mean()
            yield f"{name}: {share:.2%} of the last layer's tokens are outliers"

    def _by_grid(self, found: Mapping[str, Any]) -> dict[str, Tensor]:
        return {
            model if len(stages) == 1 else f"{model}, {norms.shape[-2]} × {norms.shape[-1]}": norms
            for model, (_, _, stages) in found.items()
            for norms in stages
        }


class FastWeightsAlong(Kind):
    """Fast weights along the image; found: the layer's name → drift, effective rank, rates."""

    what = "fast-weights"

    def look(self, subject: Subject, images: Tensor) -> Mapping[str, Any]:
        return _some_layers(subject, fast_weights(subject.backbone.around, images))

    def gather(self, subject: Subject, parts: Sequence[Part]) -> dict[str, Any]:
        layers = _mean_layers(parts)
        drift = next(iter(layers.values())).drift
        self._heads = {
            **getattr(self, "_heads", {}),
            subject.name: head_names(subject, drift[None]),
        }
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
                    yield _file(self.what, quantity.replace("_", "-"), model), figure


KINDS: dict[str, type[Kind]] = {
    kind.what: kind for kind in (GradientMap, ReceptiveField, InnerLoss, Norms, FastWeightsAlong)
}


def head_names(subject: Subject, count: int) -> list[str]:
    """Names of a model's heads: by direction where it has two; the last one of ViT³ is its conv."""
    learners = [x for x in subject.backbone.model.modules() if isinstance(x, InnerLearner)]
    if not learners:
        return [f"head {index}" for index in range(1, count)] + ["conv"]
    forward = learners[-1].num_heads
    return [
        f"→ head {index + 1}" if index < forward else f"← head {index - forward + 1}"
        for index in range(count)
    ]


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
                _mean([getattr(found[layer], name) for _, found in parts], weights)
                for name in values._fields
            )
        )
        for layer, values in first.items()
    }


def _mean(values: Sequence[Tensor], weights: Sequence[int]) -> Tensor:
    if len(values) == 1:
        return values[0]
    total = sum(x.double() * weight for x, weight in zip(values, weights, strict=True))
    return (total / sum(weights)).to(values[0].dtype)


def _arrays_of_layers(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    return {
        f"{model}/{layer}/{name}": values
        for model, layers in found.items()
        for layer, own in layers.items()
        for name, values in own._asdict().items()
    }


def _file(*parts: str) -> str:
    """A file's name of names of models and images, which may hold anything."""
    return "-".join(re.sub(r"[^\w.-]+", "-", part).strip("-.") or "x" for part in parts)
