"""A sweep's token norms as a matplotlib Figure: outliers beside loss and error, and norm maps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from studies.sweeps.definition import Panel, Sweep
from studies.sweeps.figure import MEASURES, draw_rows, log_scale
from studies.sweeps.norms import SHOWN
from studies.sweeps.results import Result
from studies.sweeps.tables import by_row
from vision_ttt.data.digits import Digits

_COLOURS = "magma"


def norm_figure(sweep: Sweep, results: Sequence[Result]) -> Figure:
    """Loss, error and outliers of every row of the sweep's panel, above maps of the token norms.

    Points are seeds, lines means over them. A map has the norms after the last block of each row's
    first seed, over the median of their image, in one colour scale for all.

    Args:
        sweep: of one panel, on the digits.
        results: measured by :func:`studies.sweeps.norms.measure_norms`.

    Raises:
        UserError: there are no results, one is not of this sweep, or one has no measures.
    """
    found = by_row(sweep, results)
    (panel,) = sweep.panels
    rows = {label: found[name] for label, name in panel.rows.items() if name in found}
    figure = Figure(figsize=(13, 4.2 + 1.5 * len(SHOWN)), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(3.6, 1.5 * len(SHOWN)))
    _draw_measures(above, panel, found, rows)
    _draw_maps(below, rows)
    figure.suptitle(f"{sweep.title}\n{sweep.caveat}", fontsize=8, wrap=True)
    return figure


def _draw_measures(
    figure: SubFigure,
    panel: Panel,
    found: dict[str, list[Result]],
    rows: dict[str, list[Result]],
) -> None:
    *ordinary, outliers, blocks = figure.subplots(1, len(MEASURES) + 2)
    for axis, (name, measure) in zip(ordinary, MEASURES, strict=True):
        draw_rows(axis, panel, found, measure)
        log_scale(axis)
        axis.set_title(f"{name} (log)", fontsize=9)
    draw_rows(outliers, panel, found, lambda result: 100 * result.measured["outlier_share"][-1])
    outliers.set_ylim(bottom=0)
    outliers.set_title("outliers after the last block, %", fontsize=9)
    for label, own in rows.items():
        ratios = zip(*(each.measured["largest_over_median"] for each in own), strict=True)
        means = [statistics.fmean(seeds) for seeds in ratios]
        blocks.plot(range(1, len(means) + 1), means, ".-", label=label)
    blocks.set(xlabel="block")
    blocks.set_title("largest / median norm", fontsize=9)
    blocks.grid(alpha=0.3)
    blocks.legend(frameon=False, fontsize=7)


def _draw_maps(figure: SubFigure, rows: dict[str, list[Result]]) -> None:
    """A line for each image: the image, then its map by each row's first seed."""
    axes = figure.subplots(len(SHOWN), 1 + len(rows), squeeze=False)
    maps = {label: own[0].measured["maps"] for label, own in rows.items()}
    largest = max(
        value for own in maps.values() for image in own for line in image for value in line
    )
    digits = Digits("test")
    for line, place in enumerate(SHOWN):
        axes[line, 0].imshow(digits[place][0])
        for axis, own in zip(axes[line, 1:], maps.values(), strict=True):
            picture = axis.imshow(own[line], cmap=_COLOURS, vmin=0, vmax=largest)
    axis: Axes
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
        axis.set_frame_on(False)
    for axis, title in zip(axes[0], ("image", *maps), strict=True):
        axis.set_title(title, fontsize=8)
    figure.colorbar(picture, ax=axes, shrink=0.6, label="norm / median of the image")
