"""`vision-ttt explain gradient-map`, `receptive-field` and `norms`: maps over pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from vision_ttt.cli.explained.kind import (
    PAGE,
    Kind,
    Part,
    Subject,
    file_name,
    head_names,
    mean_over_images,
)
from vision_ttt.errors import UserError
from vision_ttt.explain import (
    anisotropy,
    energy_within,
    gradient_magnitude,
    mean_map,
    outlier_share,
    radial_profile,
    receptive_field,
    stage_norms,
    top_fraction,
)
from vision_ttt.explain.artefact_figures import norm_histograms
from vision_ttt.explain.feature_maps import token_step
from vision_ttt.explain.field_figures import radial_profiles, receptive_field_sheet
from vision_ttt.explain.map_figures import PictureMap, head_sheet, layer_sheet, model_sheet
from vision_ttt.explain.norm_figures import norm_distributions, norm_map_sheet, over_median


class GradientMap(Kind):
    """Gradient magnitude maps; found: the image's name → what was seen of it."""

    what = "gradient-map"
    one_size = False

    def look(self, subject: Subject, images: Tensor) -> Tensor:
        state = self.arguments.state
        return gradient_magnitude(subject.backbone.around, images, state=state).cpu()

    def gather(self, subject: Subject, parts: Sequence[Part]) -> dict[str, PictureMap]:
        """The pictures with their magnitudes [layers, heads, h, w] as maps."""
        found = {}
        for batch, magnitudes in parts:
            patch = token_step(subject.backbone.model, batch.images, magnitudes.shape[-2:])
            for name, image, magnitude in zip(*batch, magnitudes, strict=True):
                found[name] = PictureMap(subject.backbone.shown(image), magnitude, patch)
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
            for image, seen in images.items():
                own = self._map(seen.map)
                place = f"{model}/{image}"
                arrays[f"{place}/magnitude"] = seen.map
                arrays[f"{place}/map"] = own
                arrays[f"{place}/top"] = top_fraction(own[None], self.arguments.fraction)[0]
        return arrays

    def figures(self, found: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
        images = list(next(iter(found.values())))
        for number, start in enumerate(range(0, len(images), PAGE), start=1):
            shown = images[start : start + PAGE]
            maps = {
                model: [own[name]._replace(map=self._map(own[name].map)) for name in shown]
                for model, own in found.items()
            }
            name = self.what if number == 1 else f"{self.what}-{number}"
            yield name, model_sheet(maps, shown, fraction=self.arguments.fraction)
        if not self.arguments.sheets:
            return
        for image in images:
            by_layer = {
                model: own[image]._replace(map=own[image].map.mean(1))
                for model, own in found.items()
            }
            yield file_name(self.what, "layers", image), layer_sheet(by_layer, title=image)
            for model, own in found.items():
                picture, magnitude, patch = own[image]
                title, heads = f"{model}, {image}", self.heads[model]
                figure = head_sheet(picture, magnitude, title=title, heads=heads, patch=patch)
                yield file_name(self.what, "heads", model, image), figure

    def _map(self, magnitude: Tensor) -> Tensor:
        return mean_map(magnitude[None], self.arguments.last_layers)[0]


class ReceptiveField(Kind):
    """Effective receptive fields; found: the field [H, W]."""

    what = "receptive-field"

    def look(self, subject: Subject, images: Tensor) -> Tensor:
        return receptive_field(subject.backbone.model, images).cpu()

    def gather(self, subject: Subject, parts: Sequence[Part]) -> Tensor:
        weights = [len(batch.names) for batch, _ in parts]
        return mean_over_images([field for _, field in parts], weights)

    def arrays(self, found: Mapping[str, Any]) -> dict[str, Tensor]:
        arrays = {}
        for model, field in found.items():
            radius = _radius(field)
            arrays[f"{model}/field"] = field
            arrays[f"{model}/radial_profile"] = radial_profile(field)
            arrays[f"{model}/energy_within"] = torch.tensor(
                [radius, energy_within(field, radius)], dtype=torch.float64
            )
            arrays[f"{model}/anisotropy"] = torch.tensor(anisotropy(field), dtype=torch.float64)
        return arrays

    def figures(self, found: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
        yield self.what, receptive_field_sheet(found)
        yield f"{self.what}-profile", radial_profiles(found)

    def lines(self, found: Mapping[str, Any]) -> Iterator[str]:
        for model, field in found.items():
            radius = _radius(field)
            yield (
                f"{model}: {energy_within(field, radius):.1%} of the response within {radius:g}"
                f" pixels, anisotropy {anisotropy(field):.2f}"
            )


def _radius(field: Tensor) -> float:
    """Radius in pixels within which the share of a field's response is reported."""
    return min(field.shape) / 4


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
                over_median(norms)  # raises before anything is written
                key = "norms" if len(stages) == 1 else f"norms_stage_{stage}"
                for name, own in zip(names, norms, strict=True):
                    arrays[f"{model}/{name}/{key}"] = own
        return arrays

    def figures(self, found: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
        absolute = self.arguments.absolute
        compared = norm_histograms if absolute else norm_distributions
        yield self.what, compared(self._by_grid(found))
        for model, (names, pictures, stages) in found.items():
            for stage, norms in enumerate(stages, start=1):
                own = (model,) if len(stages) == 1 else (model, f"stage-{stage}")
                for number, start in enumerate(range(0, len(names), PAGE), start=1):
                    page = slice(start, start + PAGE)
                    figure = norm_map_sheet(
                        pictures[page], norms[page], names[page], absolute=absolute
                    )
                    last = () if number == 1 else (f"page-{number}",)
                    yield file_name(self.what, *own, *last), figure

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
