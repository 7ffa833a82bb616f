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

_COLUMNS = 2
_MEASURES = {"loss": "test loss, nats", "error": "test error, %"}
_AXES = {"epoch": "epoch", "seconds": "share of equal seconds of training, %"}


def curves_figure(sweep: Sweep, results: Sequence[Result]) -> Figure:
    """Test loss above test error at every evaluation, for each panel of :meth:`Sweep.panels_of`.

    Axes of one measure share their range, so that panels compare. A line goes through the means
    over the seeds, in a band from the least to the largest. The x axis is the epoch. In a panel of
    equal seconds it is the share of a row's updates, because seconds of different machines do not
    compare.

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
    columns = min(_COLUMNS, len(panels))
    bands = -(-len(panels) // columns)
    figure = Figure(figsize=(1 + 4.6 * columns, 0.8 + 5.2 * bands), layout="constrained")
    places = figure.subfigures(bands, columns, squeeze=False).flat
    shared: dict[str, Axes] = {}
    for place, panel in zip(places, panels, strict=False):  # an odd number leaves one empty
        x = "seconds" if _has_equal_seconds(sweep, panel) else "epoch"
        pair = place.subplots(2, sharex=True)
        for axis, (measure, text) in zip(pair, _MEASURES.items(), strict=True):
            if measure in shared:
                axis.sharey(shared[measure])
            shared[measure] = axis
            for label, name in panel.rows.items():
                if name in found:
                    _draw(axis, found[name], x, measure, label, colours[label])
            log_scale(axis)
            axis.set_ylabel(f"{text} (log)")
            axis.grid(alpha=0.3, which="both")
        pair[0].set_title(panel.title, fontsize=9)
        pair[1].set_xlabel(_AXES[x])
        pair[1].xaxis.set_major_locator(MaxNLocator(integer=True))
    lines = {line.get_label(): line for axis in figure.axes for line in axis.lines}
    figure.legend(
        lines.values(),
        lines.keys(),
        loc="outside lower center",
        ncols=len(lines),
        frameon=False,
        fontsize=8,
    )
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
