"""A sweep's learning curves as a matplotlib Figure: what is reached after how much training."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from studies.sweeps.definition import Panel, SameSeconds, Sweep
from studies.sweeps.figure import log_scale, percent_wrong
from studies.sweeps.results import Result
from studies.sweeps.tables import by_row

_AXES = {"epoch": "epoch", "seconds": "share of equal seconds of training, %"}


def curves_figure(sweep: Sweep, results: Sequence[Result]) -> Figure:
    """Test loss above test error at every evaluation, one column of axes per panel of the sweep.

    Panels are those of :meth:`Sweep.panels_of`. A line goes through the means over the seeds, in a
    band from the least to the largest. The x axis is the epoch. In a panel of equal seconds it is
    the share of a row's updates, because seconds of different machines do not compare.

    Args:
        sweep: what was trained.
        results: with a history each.

    Raises:
        UserError: there are no results, one is not of this sweep, or one has no history.
    """
    found = by_row(sweep, results)
    panels = [sweep.panels[at] for at in sweep.panels_of(found.keys())]
    labels = dict.fromkeys(label for panel in sweep.panels for label in panel.rows)
    colours = {label: f"C{place}" for place, label in enumerate(labels)}
    figure = Figure(figsize=(1 + 4.6 * len(panels), 6.6), layout="constrained")
    axes = figure.subplots(2, len(panels), squeeze=False, sharex="col", sharey="row")
    for column, panel in enumerate(panels):
        x = "seconds" if _has_equal_seconds(sweep, panel) else "epoch"
        for label, name in panel.rows.items():
            for axis, measure in zip(axes[:, column], ("loss", "error"), strict=True):
                if name in found:
                    _draw(axis, found[name], x, measure, label, colours[label])
        axes[0, column].set_title(panel.title, fontsize=9)
        axes[0, column].legend(frameon=False, fontsize=8)
        axes[1, column].set_xlabel(_AXES[x])
        axes[1, column].xaxis.set_major_locator(MaxNLocator(integer=True))
        for axis in axes[:, column]:
            axis.grid(alpha=0.3, which="both")
    for axis, text in zip(axes[:, 0], ("test loss, nats", "test error, %"), strict=True):
        log_scale(axis)
        axis.set_ylabel(f"{text} (log)")
    figure.suptitle(f"{sweep.title}\n{sweep.caveat}", fontsize=8, wrap=True)
    return figure


def _has_equal_seconds(sweep: Sweep, panel: Panel) -> bool:
    lengths = [sweep.by_name[name].length for name in panel.rows.values()]
    return any(isinstance(length, SameSeconds) for length in lengths)


def _draw(
    axis: Axes, results: Sequence[Result], x: str, measure: str, label: str, colour: str
) -> None:
    curves = [result.curve for result in results]
    if x == "epoch":
        along = [own[x] for own in curves]
    else:
        along = [[100 * update / own["update"][-1] for update in own["update"]] for own in curves]
    places = [statistics.fmean(each) for each in zip(*along, strict=True)]
    if measure == "loss":
        heights = [own["test_loss"] for own in curves]
    else:
        heights = [
            [
                percent_wrong(accuracy, result.test_images)
                for accuracy in result.curve["test_accuracy"]
            ]
            for result in results
        ]
    seeds = list(zip(*heights, strict=True))  # of each evaluation
    means = [statistics.fmean(each) for each in seeds]
    axis.plot(places, means, ".-", color=colour, label=label)
    axis.fill_between(
        places, [*map(min, seeds)], [*map(max, seeds)], color=colour, alpha=0.15, linewidth=0
    )
