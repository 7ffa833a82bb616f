"""Figures that the reports of several tasks have: curves over epochs, bars of classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vision_ttt.explain.report import Picture, Section
from vision_ttt.files import write_bytes

_BARS = 40  # in a column
_LONGEST_NAME = 28  # letters


class Curves(NamedTuple):
    """A panel of :func:`learning_curves`."""

    title: str
    unit: str
    lines: Mapping[str, str]
    """Key in the history's rows → name of its line."""
    scale: float = 1.0
    """What the values are multiplied by."""


def learning_curves(
    history: Sequence[Mapping[str, Any]],
    panels: Sequence[Curves],
    *,
    against: str = "epoch",
    narrow: bool = False,
) -> Figure:
    """Figures of a run against the epoch or the update.

    Args:
        history: per evaluation a mapping with `against` and the keys of the panels' lines.
        against: the key of the x axis.
        narrow: one panel per row, for a phone.
    """
    places = [row[against] for row in history]
    figure, axes = panels_of_figure(len(panels), narrow)
    for axis, panel in zip(axes, panels, strict=True):
        for key, name in panel.lines.items():
            values = np.array([row[key] for row in history], dtype=float)  # None becomes NaN
            axis.plot(places, panel.scale * values, marker=".", label=name)
        axis.set(title=panel.title, xlabel=against, ylabel=panel.unit)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
        if len(panel.lines) > 1:
            axis.legend(frameon=False)
    return figure


def panels_of_figure(count: int, narrow: bool) -> tuple[Figure, list[Axes]]:
    """Return a figure of panels side by side, or one above the other for a phone."""
    rows, columns = (count, 1) if narrow else (1, count)
    figure = Figure(figsize=(4.2 * columns, (2.8 if narrow else 3.4) * rows), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).ravel())


def class_bars(
    names: Sequence[str],
    shares: Mapping[str, Sequence[float | None]],
    unit: str,
    *,
    narrow: bool = False,
) -> Figure:
    """Bars for each class that has a share, the best first, in columns of 40.

    Args:
        names: of the classes.
        shares: name of a kind of bars → its values by class, from 0 to 1; None or NaN for none.
        unit: what the values are.
        narrow: all in one column, for a phone.
    """
    values = {kind: 100 * np.array(own, dtype=np.float64) for kind, own in shares.items()}
    first = next(iter(values.values()))
    order = np.argsort(-first, kind="stable")
    order = order[~np.isnan(first[order])]
    per_column = len(order) if narrow else _BARS
    columns = [order[start : start + per_column] for start in range(0, len(order), per_column)]
    height = 1.0 + 0.24 * len(columns[0])
    figure = Figure(figsize=(4.2 * len(columns), height), layout="constrained")
    axes = figure.subplots(1, len(columns), squeeze=False)[0]
    thickness = 0.8 / len(values)
    for axis, column in zip(axes, columns, strict=True):
        places = np.arange(len(column))
        for number, (kind, own) in enumerate(values.items()):
            shift = (number - (len(values) - 1) / 2) * thickness
            axis.barh(places + shift, own[column], thickness, label=kind)
        shown = [names[place] for place in column]
        shown = [n if len(n) <= _LONGEST_NAME else f"{n[: _LONGEST_NAME - 1]}…" for n in shown]
        axis.set_yticks(places, shown, fontsize=8)
        axis.set(xlim=(0, 100), ylim=(len(columns[0]) - 0.5, -0.5), xlabel=unit)
        axis.grid(alpha=0.3, axis="x")
        if len(values) > 1:
            axis.legend(frameon=False, fontsize=8)
    return figure


def section(heading: str, caption: str, draw: Callable[..., Figure], *arguments: Any) -> Section:
    """Return a section of what `draw` draws of the arguments, for a page and for a phone."""
    return Section(heading, caption, draw(*arguments), draw(*arguments, narrow=True))


def save(sections: Mapping[str, Section | Picture], folder: Path) -> list[Section | Picture]:
    """Write each section's figure as NAME.png, and return the sections."""
    for name, each in sections.items():
        write_bytes(folder / f"{name}.png", each.png)
    return list(sections.values())
