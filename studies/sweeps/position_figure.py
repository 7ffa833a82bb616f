"""A sweep's test loss by the token's position, as a matplotlib Figure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from matplotlib.figure import Figure

from studies.sweeps.definition import Sweep
from studies.sweeps.results import Result
from studies.sweeps.tables import by_row
from vision_ttt.tasks.language.figures import middles, position_axis


def position_figure(sweep: Sweep, results: Sequence[Result]) -> Figure:
    """Test loss against the position, one panel of axes per panel of the sweep (TTT, Fig. 2).

    A line goes through the means over the seeds, in a band from the least to the largest.

    Args:
        sweep: what was trained.
        results: with the measure "bands", see
            :meth:`vision_ttt.tasks.language.evaluation.LanguageEvaluation.by_band`.

    Raises:
        UserError: there are no results, one is not of this sweep, or one has no measures.
    """
    found = by_row(sweep, results)
    figure = Figure(figsize=(1 + 3.8 * len(sweep.panels), 4.2), layout="constrained")
    axes = figure.subplots(1, len(sweep.panels), squeeze=False, sharey=True)[0]
    for axis, panel in zip(axes, sweep.panels, strict=True):
        for colour, (label, name) in enumerate(panel.rows.items()):
            if name not in found:
                continue
            bands = [result.measured["bands"] for result in found[name]]
            places = middles(bands[0])
            seeds = list(zip(*([band["loss"] for band in each] for each in bands), strict=True))
            axis.plot(places, [*map(statistics.fmean, seeds)], color=f"C{colour}", label=label)
            low, high = [*map(min, seeds)], [*map(max, seeds)]
            axis.fill_between(places, low, high, color=f"C{colour}", alpha=0.15, linewidth=0)
        axis.set_title(panel.title, fontsize=9)
        position_axis(axis)
    axes[0].set_ylabel("test loss, nats per token")
    axes[0].legend(frameon=False, fontsize=8)
    figure.suptitle(f"{sweep.title}\n{sweep.caveat}", fontsize=8, wrap=True)
    return figure
