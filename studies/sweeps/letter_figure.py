"""The sweep of letters as a figure: mean IoU by time and images, letters correct by the mark."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from studies.sweeps.definition import GivenSeconds, Panel, Sweep
from studies.sweeps.mark import BAND
from studies.sweeps.results import Result
from studies.sweeps.tables import by_row

_STYLES = {
    "Vittt": ("#0072b2", "-"),
    "ViT³": ("#56b4e9", "-"),
    "Vim": ("#009e73", "-"),
    "Mamba-Reg": ("#b8a000", "-"),
    "DeiT": ("#d55e00", "--"),
    "DeiT with Conv2d": ("#cc79a7", "--"),
    "Vittt, one direction": ("#0072b2", ":"),
    "Vittt without Conv2d": ("#0072b2", "-."),
}
"""Label → colour of Okabe and Ito's palette, and line: dashed for quadratic cost, dotted and
dash-dotted for a part left out."""


_FEWEST = 20
"""Letters of a kind in a band of distances; with fewer, it is not drawn."""


def letter_figure(sweep: Sweep, results: Sequence[Result]) -> Figure:
    """Curves of mean IoU above the share of letters correct by the mark, a column per panel.

    Curves are against seconds where a panel's rows have those given, else against images seen. A
    line goes through the means over the seeds, thinner ones are the seeds.

    Raises:
        UserError: there are no results, one is not of this sweep, or one has no history or
            measures.
    """
    found = by_row(sweep, results)
    panels = [panel for panel in sweep.panels if any(name in found for name in panel.rows.values())]
    figure = Figure(layout="constrained")
    if len(panels) == 1:
        figure.set_size_inches(9.6, 4.2)
        axes = figure.subplots(1, 2, squeeze=False).T
    else:
        figure.set_size_inches(1 + 3.4 * len(panels), 6.4)
        axes = figure.subplots(2, len(panels), squeeze=False, sharey="row")
    for panel, (above, below) in zip(panels, axes.T, strict=True):
        draw_curves(above, sweep, panel, results)
        above.set_title(panel.title, fontsize=9)
        for label, own in _rows(panel, found):
            _draw_obeyed(below, label, own)
        below.set_xlabel("pixels from the mark")
        below.axhline(50, color="0.6", linewidth=0.8)
        below.grid(alpha=0.3)
    axes[0, 0].set_ylabel("mean IoU, %")
    axes[1, 0].set_ylabel("letters correct by the mark, %\n(50: chance)")
    figure.suptitle(f"{sweep.title}\n{sweep.caveat}", fontsize=8, wrap=True)
    return figure


def draw_curves(axis: Axes, sweep: Sweep, panel: Panel, results: Sequence[Result]) -> None:
    """Draw the curves of mean IoU of a panel's rows.

    Raises:
        UserError: as :func:`letter_figure`.
    """
    found = by_row(sweep, results)
    for label, own in _rows(panel, found):
        length = sweep.by_name[own[0].row].length
        if isinstance(length, GivenSeconds):
            # By the pace that the row's length follows from: what ran beside it does not matter.
            axis.set_xlabel("seconds of training, one thread")
            updates = own[0].curve["update"]
            places = [length.seconds * update / updates[-1] for update in updates]
            name = f"{label} ({own[0].measured['images'][-1]:,} images)"
        else:
            axis.set_xlabel("images seen")
            places = own[0].measured["images"]
            name = label
        seeds = list(zip(*(result.curve["test_accuracy"] for result in own), strict=True))
        line = _draw(axis, places, [[100 * each for each in values] for values in seeds], label)
        line.set_label(name)
    axis.legend(frameon=False, fontsize=7)
    axis.grid(alpha=0.3)


def _rows(panel: Panel, found: dict[str, list[Result]]) -> list[tuple[str, list[Result]]]:
    return [(label, found[name]) for label, name in panel.rows.items() if name in found]


def _draw_obeyed(axis: Axes, label: str, results: Sequence[Result]) -> None:
    """Draw the balanced share of letters correct by the mark, by bands of distance from it."""
    places, heights = [], []
    for place, bands in enumerate(zip(*(r.measured["bands"] for r in results), strict=True)):
        if any(min(band["count"], band["not_count"]) < _FEWEST for band in bands):
            continue
        places.append((place + 0.5) * BAND)
        heights.append(
            [
                50 * (band["shown"] / band["count"] + band["hidden"] / band["not_count"])
                for band in bands
            ]
        )
    _draw(axis, places, heights, label)


def _draw(
    axis: Axes, places: Sequence[float], heights: Sequence[Sequence[float]], label: str
) -> Line2D:
    colour, line = _STYLES.get(label, (None, "-"))
    means = [statistics.fmean(each) for each in heights]
    (drawn,) = axis.plot(places, means, line, marker=".", color=colour, label=label)
    if heights and len(heights[0]) > 1:
        # Not a band: a seed has either learnt to read the mark or not.
        axis.plot(places, heights, line, color=drawn.get_color(), alpha=0.4, linewidth=0.8)
    return drawn
