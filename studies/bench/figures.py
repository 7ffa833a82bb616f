"""Time and memory of contenders against the size of the input, as a matplotlib Figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from studies.bench.fits import by_line
from studies.bench.names import MOST_LINES
from vision_ttt.bench.contenders import size_of
from vision_ttt.bench.rows import Row

_LABEL_HEIGHT = 0.055  # as a share of a panel: closer labels would overlap


def chosen_lines(
    rows: Sequence[Row], contenders: Sequence[str] | None = None
) -> dict[str, list[Row]]:
    """Choose the lines of a figure: label → rows by size.

    By default these are the lines with two sizes or more, of models of the last such row's size, at
    most MOST_LINES: the fastest at the largest size. Single points are drawn only where there are
    no lines.

    Args:
        contenders: the contenders to draw instead.

    Raises:
        ValueError: there are no rows, or more contenders than MOST_LINES.
    """
    if not rows:
        raise ValueError("there must be rows to draw, got none")
    if contenders is not None:
        if len(contenders) > MOST_LINES:
            raise ValueError(f"a figure has {MOST_LINES} lines at most, got {len(contenders)}")
        rows = [row for row in rows if row.contender in contenders]
    lines = {label: sorted(own, key=lambda row: row.extent) for label, own in by_line(rows).items()}
    if contenders is not None:
        return lines
    long = {label: own for label, own in lines.items() if len({row.extent for row in own}) > 1}
    lines = long or lines
    size = size_of(list(lines.values())[-1][-1].contender)
    lines = {label: own for label, own in lines.items() if size_of(own[-1].contender) == size}

    def at_the_end(label: str) -> tuple[int, float]:
        row = lines[label][-1]
        return -row.extent, float("inf") if row.seconds is None else row.seconds

    return {label: lines[label] for label in sorted(lines, key=at_the_end)[:MOST_LINES]}


def cost_figure(lines: Mapping[str, Sequence[Row]]) -> Figure:
    """Draw time and memory against resolution (ops: tokens), with labels at the lines' ends.

    Memory is the sum of a call's peak and of what is held between calls. Without a measurement the
    panel is omitted.

    Args:
        lines: see :func:`chosen_lines`.
    """
    rows = [row for own in lines.values() for row in own]
    of_ops = rows[0].resolution is None
    has_memory = any(_mebibytes(row) > 0 for row in rows)
    figure = Figure(figsize=(5.6 * (1 + has_memory), 3.9), layout="constrained")
    axes = figure.subplots(1, 1 + has_memory, squeeze=False)[0]
    call = "call" if of_ops or rows[0].batch_size > 1 else "image"
    axes[0].set(title="Time", ylabel=f"ms per {call}")
    _draw(axes[0], lines, lambda row: float("nan") if row.seconds is None else 1e3 * row.seconds)
    if has_memory:
        axes[1].set(title=f"Memory without the {'inputs' if of_ops else 'weights'}", ylabel="MiB")
        _draw(axes[1], lines, _mebibytes)
    first = rows[0]
    figure.suptitle(
        f"{first.measured if not of_ops else first.case or 'ttt_linear'}, batch {first.batch_size},"
        f" {first.dtype}, {first.run.device_name}, {first.run.threads} threads",
        fontsize=9,
    )
    return figure


def _mebibytes(row: Row) -> float:
    """The peak of a call and what is held; NaN for zero, which a log axis cannot show."""
    total = (row.peak_bytes or 0) + (row.held_bytes or 0)
    return total / 2**20 if total else float("nan")


def _draw(axis: Axes, lines: Mapping[str, Sequence[Row]], value: Callable[[Row], float]) -> None:
    sizes = sorted({row.extent for own in lines.values() for row in own})
    of_ops = next(iter(lines.values()))[0].resolution is None
    axis.set(xscale="log", yscale="log", xlabel="tokens" if of_ops else "pixels along a side")
    axis.set_xticks(sizes, [str(size) for size in sizes], rotation=45)
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.grid(alpha=0.3, which="both")
    ends = {}
    for label, own in lines.items():
        heights = [value(row) for row in own]
        (line,) = axis.plot([row.extent for row in own], heights, marker=".", label=label)
        known = [
            (row.extent, height)
            for row, height in zip(own, heights, strict=True)
            if not math.isnan(height)
        ]
        if known:
            ends[label] = (*known[-1], line.get_color())
    _write_labels(axis, ends)


def _write_labels(axis: Axes, ends: Mapping[str, tuple[float, float, str]]) -> None:
    """Write each line's label right of its end; stack the labels of lines that end at one size."""
    _ = axis.get_xlim(), axis.get_ylim()  # updates the limits, which matplotlib computes lazily
    to_axes = axis.transData + axis.transAxes.inverted()
    stacks: dict[float, list[tuple[str, float, float]]] = {}
    for label, (extent, height, _) in sorted(ends.items(), key=lambda end: end[1][1]):
        x, y = to_axes.transform((extent, height))
        stacks.setdefault(extent, []).append((label, x, y))
    for label, x, y in (place for stack in stacks.values() for place in _apart(stack)):
        axis.text(
            *(x + 0.02, y, label.replace("_patch16_224", "")),
            transform=axis.transAxes,
            color=ends[label][2],
            fontsize=8,
            va="center",
            bbox={"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 0.5},
        )


def _apart(stack: Sequence[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """Labels and places in a panel, from the lowest up: moved so that none covers another."""
    heights, lowest = [], 0.0
    for _, _, y in stack:
        heights.append(max(y, lowest))
        lowest = heights[-1] + _LABEL_HEIGHT
    highest = 1.0  # the panel's top, above which only a stack higher than the panel goes
    for index in reversed(range(len(heights))):
        heights[index] = min(heights[index], max(highest, index * _LABEL_HEIGHT))
        highest = heights[index] - _LABEL_HEIGHT
    return [(label, x, y) for (label, x, _), y in zip(stack, heights, strict=True)]
