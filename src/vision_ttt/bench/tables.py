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


def tabulate(
    rows: Sequence[Row], baseline: str | None = None, *, among: Sequence[Row] | None = None
) -> Table:
    """Tabulate rows of one command with their speeds relative to a baseline contender.

    Beside the speed of a model stands the limit at equal efficiency, the ratio of multiply-adds;
    beside that of an op its share of the machine's matmul rate.

    Args:
        rows: the table's lines.
        baseline: its name; by default see :func:`default_baseline`.
        among: rows with the baseline's; by default `rows`.
    """
    among = rows if among is None else among
    baseline = baseline or default_baseline(row.contender for row in among)
    of_ops = rows[0].resolution is None
    headings = ["contender", *(["pass", "tokens"] if of_ops else ["pixels"]), "batch"]
    headings += ["ms", "±", "tokens/s" if of_ops else "images/s", "× baseline"]
    headings += ["of matmul" if of_ops else "by MACs", "MACs", "MiB"]
    lines = []
    for row in rows:
        base = find_baseline(row, baseline, among)
        size = [row.measured, f"{row.tokens:,}"] if of_ops else [f"{row.resolution}²"]
        if of_ops:
            limit = "" if row.matmul_share is None else f"{row.matmul_share:.0%}"
        else:
            limit = "" if base is None else f"{base.macs / row.macs:.2f}"
        ratio = "" if base is None else _figure(base.seconds / row.seconds)
        lines.append(
            [
                *(row.contender, *size, str(row.batch_size)),
                *(_figure(1e3 * row.seconds), _figure(1e3 * row.seconds_spread)),
                *(_figure(row.per_second), ratio, limit, _count(row.macs)),
                "" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:,.1f}",
            ]
        )
    return Table(headings, lines)


def describe(rows: Sequence[Row], baseline: str | None = None) -> str:
    """What the rows of one command have in common, in a line."""
    row, run = rows[0], rows[0].run
    baseline = baseline or default_baseline(row.contender for row in rows)
    kernels = f", kernels for {run.instruction_set}" if run.instruction_set else ""
    where = f"{run.processor}, {run.cores} cores{kernels}, {run.threads} threads"
    if row.device != "cpu":
        where = f"{run.device_name} ({where})"
    compiled = ", compiled" if row.compiled else ""
    return (
        f"{row.dtype}{compiled}, median of {row.repeats} ± interquartile range; {where}; torch"
        f" {run.torch}, timm {run.timm}, vision-ttt {run.vision_ttt}; {run.started};"
        f" baseline: {baseline}"
    )


def exponents(rows: Sequence[Row]) -> dict[str, float]:
    """Fit time = c · tokenˢ per contender (and pass): label → s, where it has two sizes or more."""
    fits = {}
    for label, own in by_line(rows).items():
        if len({row.size for row in own}) > 1:
            sizes = np.log([row.size for row in own])
            fits[label] = float(np.polyfit(sizes, np.log([row.seconds for row in own]), 1)[0])
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
