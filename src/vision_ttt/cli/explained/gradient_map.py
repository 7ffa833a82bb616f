"""`vision-ttt explain gradient-map`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from torch import Tensor

from vision_ttt.cli.explained.kind import PAGE, Kind, Part, Subject, file_name, head_names
from vision_ttt.errors import UserError
from vision_ttt.explain import gradient_magnitude, mean_map, top_fraction
from vision_ttt.explain.feature_maps import token_step
from vision_ttt.explain.map_figures import PictureMap, head_sheet, layer_sheet, model_sheet


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
