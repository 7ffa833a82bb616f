"""What contenders cost against the size of the input, as a matplotlib Figure."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from vision_ttt.bench.rows import Row
from vision_ttt.bench.tables import by_line


def cost_figure(rows: Sequence[Row]) -> Figure:
    """Multiply-adds, throughput and memory against resolution (ops: tokens), log axes.

    The three panels of Vision-TTT's Fig. 6; memory is left out where none was measured.

    Raises:
        ValueError: there are no rows.
    """
    if not rows:
        raise ValueError("there are no rows to draw")
    of_ops = rows[0].resolution is None
    has_memory = any(row.peak_bytes for row in rows)
    figure = Figure(figsize=(4.2 * (2 + has_memory), 3.8), layout="constrained")
    axes = figure.subplots(1, 2 + has_memory, squeeze=False)[0]
    per = "call" if of_ops else "image, forward"
    axes[0].set(title="Multiply-adds", ylabel=f"GMACs per {per}")
    axes[1].set(title="Throughput", ylabel="tokens per second" if of_ops else "images per second")
    if has_memory:
        axes[2].set(title=f"Memory above the {'inputs' if of_ops else 'weights'}", ylabel="MiB")
    sizes = sorted({row.extent for row in rows})
    for number, (label, own) in enumerate(by_line(rows).items()):
        own = sorted(own, key=lambda row: row.extent)
        values = [
            [row.macs / 1e9 for row in own],
            [row.per_second or float("nan") for row in own],  # not measured
            # A call that took no page has no place on a log axis.
            [row.peak_bytes / 2**20 if row.peak_bytes else float("nan") for row in own],
        ]
        for axis, heights in zip(axes, values, strict=False):
            # Two kinds of attention have the same multiply-adds: both lines must show.
            style = "--" if number % 2 else "-"
            axis.plot([row.extent for row in own], heights, style, marker=".", label=label)
    for axis in axes:
        axis.set(xscale="log", yscale="log", xlabel="tokens" if of_ops else "pixels along a side")
        axis.set_xticks(sizes, [str(size) for size in sizes], rotation=45)
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.grid(alpha=0.3, which="both")
    first = rows[0]
    figure.suptitle(
        f"{first.measured if not of_ops else first.case or 'ttt_linear'}, batch {first.batch_size},"
        f" {first.dtype}, {first.run.device_name}, {first.run.threads} threads",
        fontsize=9,
    )
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure
