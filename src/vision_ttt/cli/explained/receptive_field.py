"""`vision-ttt explain receptive-field`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from vision_ttt.cli.explained.kind import Kind, Part, Subject, mean_over_images
from vision_ttt.explain import anisotropy, energy_within, radial_profile, receptive_field
from vision_ttt.explain.field_figures import radial_profiles, receptive_field_sheet


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
