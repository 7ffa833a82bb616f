"""Pictures of the experiments of the TTT-layers paper, as matplotlib Figures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from studies.sweeps.definition import Sweep
from studies.sweeps.figure import draw_rows
from studies.sweeps.results import Result
from studies.sweeps.tables import by_row

_Measure = Callable[[Result], float]


def _perplexity(result: Result) -> float:
    return result.measured["perplexity"]


def _finish(figure: Figure, sweep: Sweep) -> Figure:
    figure.suptitle(f"{sweep.title}\n{sweep.caveat}", fontsize=8, wrap=True)
    return figure


def perplexity_figure(sweep: Sweep, results: Sequence[Result]) -> Figure:
    """Perplexity of each row, a panel of axes per panel of the sweep (TTT, Table 1).

    Raises:
        UserError: there are no results, one is not of this sweep, or one has no measures.
    """
    found = by_row(sweep, results)
    figure = Figure(figsize=(1 + 4 * len(sweep.panels), 4.4), layout="constrained")
    axes = figure.subplots(1, len(sweep.panels), squeeze=False)[0]
    for axis, panel in zip(axes, sweep.panels, strict=True):
        draw_rows(axis, panel, found, _perplexity)
        axis.set_title(panel.title, fontsize=9)
    axes[0].set_ylabel("perplexity per byte")
    return _finish(figure, sweep)


def batch_figure(sweep: Sweep, results: Sequence[Result]) -> Figure:
    """Perplexity and the time of a layer's forward pass over b (TTT, Fig. 8).

    Raises:
        UserError: as :func:`perplexity_figure`.
    """
    found = by_row(sweep, results)
    (panel,) = sweep.panels
    sizes = {int(label): found[name] for label, name in panel.rows.items() if name in found}
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _line(left, sizes, _perplexity, "perplexity")
    for part, label in (("states", "states after mini-batches"), ("total", "and outputs")):
        _line(right, sizes, lambda r, part=part: r.measured["milliseconds"][part], label)
    left.set_ylabel("perplexity per byte")
    right.set_ylabel("forward pass of the inner learner, ms")
    right.legend(frameon=False, fontsize=8)
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("mini-batch size b")
        axis.grid(alpha=0.3)
    return _finish(figure, sweep)


def flops_figure(sweep: Sweep, results: Sequence[Result]) -> Figure:
    """Perplexity over the FLOPs of training by context, and over the context by size.

    The upper row is the paper's Figs. 11 and 12, the lower one its Fig. 19. Rows are named
    METHOD-SIZE-CONTEXT, their labels METHOD, SIZE.

    Raises:
        UserError: as :func:`perplexity_figure`.
    """
    found = by_row(sweep, results)
    places = {
        name: (*label.rsplit(", ", 1), int(name.rpartition("-")[2]))
        for panel in sweep.panels
        for label, name in panel.rows.items()
        if name in found
    }
    methods, sizes, contexts = (list(dict.fromkeys(x)) for x in zip(*places.values(), strict=True))
    columns = max(len(sizes), len(contexts))
    figure = Figure(figsize=(1 + 3.4 * columns, 7), layout="constrained")
    axes = figure.subplots(2, columns, squeeze=False, sharey=True)
    for axis in axes.ravel()[
        [*range(len(contexts), columns), *range(columns + len(sizes), 2 * columns)]
    ]:
        axis.set_axis_off()
    for colour, method in enumerate(methods):
        own = {place[1:]: found[name] for name, place in places.items() if place[0] == method}
        style = {"color": f"C{colour}", "marker": ".", "label": method}
        for axis, context in zip(axes[0], contexts, strict=False):
            rows = [rows for (_, c), rows in own.items() if c == context]
            points = [(r[0].measured["training_flops"], _mean(r)) for r in rows]
            axis.plot(*zip(*sorted(points), strict=True), **style) if points else None
            axis.set(title=f"context {context}", xscale="log", xlabel="FLOPs of training")
        for axis, size in zip(axes[1], sizes, strict=False):
            points = sorted((c, _mean(rows)) for (s, c), rows in own.items() if s == size)
            axis.plot(*zip(*points, strict=True), **style) if points else None
            axis.set(title=f"size {size}", xlabel="context")
            axis.set_xscale("log", base=2)
    for row in axes:
        row[0].set(ylabel="perplexity per byte", yscale="log")
    axes[0][0].legend(frameon=False, fontsize=8)
    return _finish(figure, sweep)


def _mean(results: Sequence[Result], measure: _Measure = _perplexity) -> float:
    return statistics.fmean(map(measure, results))


def _line(axis: Axes, groups: dict[int, list[Result]], measure: _Measure, label: str) -> None:
    means = [_mean(results, measure) for results in groups.values()]
    axis.plot(list(groups), means, marker=".", label=label)
