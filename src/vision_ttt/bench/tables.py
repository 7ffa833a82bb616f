"""Rows as tables: the same cells for the terminal and for Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vision_ttt.bench.contenders import default_baseline
from vision_ttt.bench.rows import Row, find_baseline


class Table(NamedTuple):
    """Headings and cells; the first column is text, the others are figures."""

    headings: list[str]
    lines: list[list[str]]


class Fit(NamedTuple):
    """The exponent of time in tokens, and the sizes between which it was fitted."""

    exponent: float
    smallest: int
    largest: int
    unit: str
    """Of the sizes: tokens, or pixels along a side."""

    def sentence(self, label: str) -> str:
        """E.g. "dual, forward: time ~ tokens^1.003 between 4,096 and 65,536 tokens"."""
        between = f"between {self.smallest:,} and {self.largest:,} {self.unit}"
        return f"{label}: time ~ tokens^{self.exponent:.3f} {between}"


def tabulate(
    rows: Sequence[Row], baseline: str | None = None, *, among: Sequence[Row] | None = None
) -> Table:
    """Tabulate rows of one command with their speeds relative to a baseline contender.

    Beside the speed of a model stands the limit at equal efficiency, the ratio of multiply-adds;
    beside that of an op its share of the machine's matmul rate.

    A row without a measurement says why in the place of its time.

    Args:
        rows: the table's lines.
        baseline: its name; by default each row has its own, see :func:`default_baseline`.
        among: rows with the baselines'; by default `rows`.
    """
    among = rows if among is None else among
    of_ops = rows[0].resolution is None
    headings = ["contender", *(["pass", "tokens"] if of_ops else ["pixels"]), "batch"]
    headings += ["ms", "±", "tokens/s" if of_ops else "images/s", "× baseline"]
    headings += ["of matmul" if of_ops else "by MACs", "MACs", "MiB"]
    lines = []
    for row in rows:
        base = find_baseline(row, baseline or _own_baseline(row, among), among)
        size = [row.measured, f"{row.tokens:,}"] if of_ops else [f"{row.resolution}²"]
        if of_ops:
            limit = "" if row.matmul_share is None else f"{row.matmul_share:.0%}"
        else:
            limit = "" if base is None else f"{base.macs / row.macs:.2f}"
        if row.seconds is None:
            figures = [row.failure, "", "", ""]
        else:
            known = base is not None and base.seconds is not None
            figures = [
                *(_figure(1e3 * row.seconds), _figure(1e3 * row.seconds_spread)),
                *(_figure(row.per_second), _figure(base.seconds / row.seconds) if known else ""),
            ]
        lines.append(
            [
                *(row.contender, *size, str(row.batch_size)),
                *(*figures, limit, _count(row.macs)),
                "" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:,.1f}",
            ]
        )
    return Table(headings, lines)


def describe(rows: Sequence[Row], baseline: str | None = None) -> str:
    """What the rows of one command have in common, in a line."""
    row, run = rows[0], rows[0].run
    baselines = [baseline] if baseline else [_own_baseline(other, rows) for other in rows]
    kernels = f", kernels for {run.instruction_set}" if run.instruction_set else ""
    where = f"{run.processor}, {run.cores} cores{kernels}, {run.threads} threads"
    if row.device != "cpu":
        details = [f"driver {run.driver}", f"CUDA {run.cuda}", run.clocks, where]
        where = f"{run.device_name} ({', '.join(detail for detail in details if detail)})"
    how = f"{row.dtype}{' autocast' if row.autocast else ''}{', compiled' if row.compiled else ''}"
    packages = {"torch": run.torch, "timm": run.timm, "triton": run.triton}
    packages |= {"flash-linear-attention": run.flash_linear_attention}
    packages |= {"vision-ttt": run.vision_ttt}
    versions = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
    parts = [
        f"{how}, median of {row.repeats} ± interquartile range",
        *([row.case] if row.case else []),
        where,
        versions,
        run.started,
        f"baseline: {', '.join(dict.fromkeys(baselines))}",
        *_kernels(rows),
    ]
    return "; ".join(parts)


def _own_baseline(row: Row, among: Sequence[Row]) -> str:
    return default_baseline(row.contender, dict.fromkeys(other.contender for other in among))


def _kernels(rows: Sequence[Row]) -> list[str]:
    """What fused kernels ran, contenders that ran the same ones named together."""
    sharing: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.kernels:
            sharing.setdefault(row.kernels, {})[row.contender] = None
    return [f"{', '.join(names)} ran {kernels}" for kernels, names in sharing.items()]


def exponents(rows: Sequence[Row], between: tuple[float, float] = (0, math.inf)) -> dict[str, Fit]:
    """Fit time = c · tokenˢ by least squares of the logarithms, per contender (and pass).

    Args:
        rows: of one command. What cost grows with is tokens, or pixels, which are proportional.
        between: the smallest and the largest size that counts: tokens of an op, pixels along a
            side of a model.

    Returns:
        label → fit, for those that were measured at two sizes or more.
    """
    smallest, largest = between
    fits = {}
    for label, own in by_line(rows).items():
        timed = [row for row in own if row.seconds is not None]
        fitted = [row for row in timed if smallest <= row.extent <= largest]
        sizes = sorted({row.extent for row in fitted})
        if len(sizes) > 1:
            unit = "tokens" if own[0].resolution is None else "pixels along a side"
            logarithms = np.log([[row.size, row.seconds] for row in fitted])
            slope = np.polyfit(logarithms[:, 0], logarithms[:, 1], 1)[0]
            fits[label] = Fit(float(slope), sizes[0], sizes[-1], unit)
    return fits


def by_line(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each line of a picture."""
    lines: dict[str, list[Row]] = {}
    for row in rows:
        label = f"{row.contender}, {row.measured}" if row.what == "ops" else row.contender
        lines.setdefault(label, []).append(row)
    return lines


def _figure(value: float) -> str:
    """Three digits, or all of the whole number where it has more."""
    if value == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 4)}f}"


def _count(value: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}"
