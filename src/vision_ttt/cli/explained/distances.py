"""`vision-ttt explain distances`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from vision_ttt.cli.explained.kind import PAGE, Kind, Part, Subject, file_name
from vision_ttt.explain import token_distances
from vision_ttt.explain.artefact_figures import distance_sheet


class Distances(Kind):
    """Distances to global tokens; found: names, pictures [B, 3, H, W], distances [B, n, h, w]."""

    what = "distances"

    def look(self, subject: Subject, images: Tensor) -> Tensor:
        return token_distances(subject.backbone.model, images).cpu()

    def gather(self, subject: Subject, parts: Sequence[Part]) -> tuple[list[str], Tensor, Tensor]:
        names = [name for batch, _ in parts for name in batch.names]
        shown = [subject.backbone.shown(image) for batch, _ in parts for image in batch.images]
        return names, torch.stack(shown), torch.cat([own for _, own in parts])

    def arrays(self, found: Mapping[str, Any]) -> dict[str, Tensor]:
        return {
            f"{model}/{name}/distances": own
            for model, (names, _, distances) in found.items()
            for name, own in zip(names, distances, strict=True)
        }

    def figures(self, found: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
        for model, (names, pictures, distances) in found.items():
            for number, start in enumerate(range(0, len(names), PAGE), start=1):
                page = slice(start, start + PAGE)
                figure = distance_sheet(pictures[page], distances[page], names[page])
                last = () if number == 1 else (f"page-{number}",)
                yield file_name(self.what, model, *last), figure
