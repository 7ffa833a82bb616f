"""A sweep's results as a matplotlib Figure: every seed as a point, the mean as a line."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from studies.sweeps.definition import Panel, Sweep
from studies.sweeps.results import Result
from studies.sweeps.tables import by_row

_COLUMNS = 4
Measure = Callable[[Result], float]


def percent_wrong(accuracy: float, images: int) -> float:
    """The error in %; of no image, for which a log axis has no place, that of half an image."""
    return 100 * (1 - accuracy) or 50 / images


MEASURES: tuple[tuple[str, Measure], ...] = (
    ("test loss, nats", lambda result: result.test_loss),
    ("test error, %", lambda result: percent_wrong(result.test_accuracy, result.test_images)),
)
"""What every sweep's picture shows, on log axes."""


def sweep_figure(sweep: Sweep, results: Sequence[Result]) -> Figure:
    """Test loss above test error, one column of axes per panel of the sweep.

    Axes of one measure share their range, so that panels compare. Points are seeds; the line goes
    through the means. An error of no image of the test set is drawn as that of half an image.

    Raises:
        UserError: there are no results, or one is not of this sweep.
    """
    found = by_row(sweep, results)
    panels = [panel for panel in sweep.panels if any(name in found for name in panel.rows.values())]
    columns = min(_COLUMNS, len(panels))
    bands = -(-len(panels) // columns)
    figure = Figure(figsize=(1 + 3.1 * columns, 0.6 + 5.2 * bands), layout="constrained")
    axes = figure.subplots(2 * bands, columns, squeeze=False, sharey="row")
    for place in range(bands * columns):
        band, column = divmod(place, columns)
        pair = [axes[2 * band + part][column] for part in range(2)]
        if place >= len(panels):
            for axis in pair:
                axis.axis("off")
            continue
        for axis, (name, measure) in zip(pair, MEASURES, strict=True):
            draw_rows(axis, panels[place], found, measure)
            log_scale(axis)
            if column == 0:
                axis.set_ylabel(f"{name} (log)")
        pair[0].set_title(panels[place].title, fontsize=9)
    for part, (_name, measure) in enumerate(MEASURES):
        values = [measure(result) for result in results]
        for band in range(bands):
            axes[2 * band + part][0].set_ylim(0.85 * min(values), max(values) / 0.85)
    figure.suptitle(f"{sweep.title}\n{sweep.caveat}", fontsize=9)
    return figure


def draw_rows(axis: Axes, panel: Panel, found: dict[str, list[Result]], measure: Measure) -> None:
    """Draw every seed of a panel's rows as a point, and their means."""
    labels = [label for label, name in panel.rows.items() if name in found]
    means = []
    for place, label in enumerate(labels):
        values = [measure(result) for result in found[panel.rows[label]]]
        axis.plot([place] * len(values), values, "o", color="C0", markersize=4, alpha=0.6)
        means.append(statistics.fmean(values))
    style = "-_" if panel.in_steps else "_"
    axis.plot(range(len(labels)), means, style, color="C1", markersize=14, linewidth=0.8)
    axis.set_xticks(range(len(labels)), labels, rotation=35, ha="right", fontsize=8)
    axis.margins(x=0.15)
    axis.grid(alpha=0.3, which="both", axis="y")


def log_scale(axis: Axes) -> None:
    """Set a log scale with ticks at 1, 2, 5, 10, …"""
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
