"""Figures of deletion and insertion curves, as matplotlib Figures that need no display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from studies.deletion.study import METHODS, RANDOM, MapCurves

# Okabe and Ito's colours; what knows nothing of the model is black and grey.
_STYLES = {
    RANDOM: ("#000000", "--"),
    "centre": ("#888888", ":"),
    "contrast": ("#888888", "-."),
    "gradient magnitude, final": ("#D55E00", "-"),
    "gradient magnitude, initial": ("#E69F00", "-"),
    "gradient magnitude, current": ("#CC79A7", "-"),
    "attention rollout": ("#56B4E9", "-"),
    "gradient × input": ("#0072B2", "-"),
    "Grad-CAM": ("#009E73", "-"),
}
_WHAT = {"deletion": "removed, highest first", "insertion": "revealed, highest first"}


def deletion_figure(panels: Mapping[str, Sequence[MapCurves]]) -> Figure:
    """Probability of the true class against the share of tokens removed, and revealed.

    A row of axes for each panel: deletion, where a good map's line is low, and insertion, where it
    is high. A line goes through the means over a method's curves, e.g. those of the models of
    several seeds, in a band from the least to the largest.

    Args:
        panels: title, e.g. a model on a data set → curves of one fill and the same shares.

    Raises:
        ValueError: there is no panel or no curve in one, or the curves of a panel differ in fill or
            shares.
    """
    if not panels:
        raise ValueError("there must be at least one panel, got none")
    for title, curves in panels.items():
        if len({(each.fill, each.shares) for each in curves}) != 1:
            raise ValueError(
                f"the curves of panel {title!r} must be some, of one fill and the same shares"
            )
    figure = Figure(figsize=(9.2, 1 + 2.9 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 2, squeeze=False, sharey="row", sharex=True)
    handles = {}
    for row, (title, curves) in zip(axes, panels.items(), strict=True):
        for axis, measure in zip(row, _WHAT, strict=True):
            handles |= _draw(axis, curves, measure)
            axis.set_title(f"{title}: {measure}", fontsize=9)
        row[0].set_ylabel("probability of the true class")
    for axis, what in zip(axes[-1], _WHAT.values(), strict=True):
        axis.set_xlabel(f"tokens {what}")
        axis.xaxis.set_major_formatter(PercentFormatter(1))
    names = [name for name in METHODS if name in handles]
    figure.legend(
        [handles[name] for name in names],
        names,
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=8,
    )
    return figure


def _draw(axis: Axes, curves: Sequence[MapCurves], measure: str) -> dict[str, object]:
    """Draw a line per method and return its handles for the legend."""
    handles = {}
    for name, (colour, style) in _STYLES.items():
        own = [each for each in curves if each.method == name]
        if not own:
            continue
        heights = np.array([getattr(each, measure) for each in own])
        (handles[name],) = axis.plot(
            own[0].shares, heights.mean(0), style, color=colour, linewidth=1.6
        )
        band = (heights.min(0), heights.max(0))
        axis.fill_between(own[0].shares, *band, color=colour, alpha=0.15, linewidth=0)
    axis.set_ylim(0, 1)
    axis.set_xlim(0, 1)
    axis.grid(alpha=0.3)
    return handles
