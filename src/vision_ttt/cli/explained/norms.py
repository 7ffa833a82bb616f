"""`vision-ttt explain norms`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from vision_ttt.cli.explained.kind import PAGE, Kind, Part, Subject, file_name
from vision_ttt.explain import outlier_share, stage_norms
from vision_ttt.explain.artefact_figures import norm_histograms
from vision_ttt.explain.norm_figures import norm_distributions, norm_map_sheet


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
                    last = () if number == 1 else (str(number),)
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
