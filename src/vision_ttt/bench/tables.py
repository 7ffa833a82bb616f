"""Rows as tables, with the same cells for the terminal and for Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from vision_ttt.bench.contenders import is_ours, size_of
from vision_ttt.bench.rows import Row, find_baseline


class Table(NamedTuple):
    """Headings and cells. The first column is text, the others are figures."""

    headings: list[str]
    lines: list[list[str]]


class Rivals(NamedTuple):
    """Other projects' models of a row's size, by the same command and at the same resolution.

    Each field is the fastest row of its kind, or None where none was timed.
    """

    strongest: Row | None
    """By any runtime: what one would deploy instead."""
    eager: Row | None
    """PyTorch's modules with fused attention."""
    plain: Row | None
    """PyTorch's modules with plain attention, which the papers measure."""


def tabulate(
    rows: Sequence[Row], baseline: str | None = None, *, among: Sequence[Row] | None = None
) -> Table:
    """Tabulate rows of one command, with their speeds relative to other rows of that command.

    A model is compared with its :class:`Rivals`. The ratio of
    multiply-adds to the strongest one follows, as the limit at equal efficiency. An op is compared
    with `dual`; its shares of the machine's matmul rate and of the multiply-adds in registers
    follow.

    A row without a measurement has the reason in place of its time.

    Args:
        rows: the table's lines.
        baseline: a contender to compare all rows with instead.
        among: rows that include those to compare with; by default `rows`.
    """
    among = rows if among is None else among
    of_ops = rows[0].resolution is None
    several = of_ops or rows[0].what == "dense"  # kinds of measurements
    comparisons = {row: _compared_with(row, baseline, among) for row in rows}
    kinds = [
        kind
        for kind in next(iter(comparisons.values()))
        if any(others[kind] is not None for others in comparisons.values())
    ]
    held = any(row.held_bytes is not None for row in rows)
    headings = ["contender", *(["pass"] if several else []), "tokens" if of_ops else "pixels"]
    headings += ["batch"]
    headings += ["ms", "±", "tokens/s" if of_ops else "images/s", *(f"× {kind}" for kind in kinds)]
    headings += ["of matmul", "of FMA peak"] if of_ops else ["by MACs"]
    headings += ["MACs", "MiB", *(["MiB held"] if held else [])]
    lines = []
    for row, others in comparisons.items():
        size = [*([row.measured] if several else []), f"{row.tokens:,}" if of_ops else pixels(row)]
        if of_ops:
            shares = (row.matmul_share, row.fma_share)
            limits = ["" if share is None else f"{share:.0%}" for share in shares]
        else:
            first = next(iter(others.values()))
            limits = ["" if first is None else f"{first.macs / row.macs:.2f}"]
        if row.seconds is None:
            figures = [row.failure, "", "", *("" for _ in kinds)]
        else:
            figures = [
                *(_figure(1e3 * row.seconds), _spread(row)),
                *(_figure(row.per_second), *(speed(row, others[kind]) for kind in kinds)),
            ]
        lines.append(
            [
                *(row.contender, *size, str(row.batch_size)),
                *(*figures, *limits, _count(row.macs), _mebibytes(row.peak_bytes)),
                *([_mebibytes(row.held_bytes)] if held else []),
            ]
        )
    return Table(headings, lines)


def _spread(row: Row) -> str:
    return "" if row.seconds_spread is None else _figure(1e3 * row.seconds_spread)


def pixels(row: Row) -> str:
    """The size of a model's images: "224²", or width and height as "1333×800"."""
    return f"{row.resolution}²" if row.width is None else f"{row.width}×{row.resolution}"


def find_rivals(row: Row, among: Sequence[Row]) -> Rivals:
    """Find the rivals of a model's row among rows of any commands.

    A rival has the size word of the row's model: DeiT-S is a rival of Vittt-S. If the command
    measured no such model, all other projects' models are rivals.
    """
    beside = [
        other
        for other in among
        if (other.run, other.measured, other.size) == (row.run, row.measured, row.size)
        and not is_ours(other.contender)
    ]
    own_size = size_of(row.contender)
    of_its_size = [other for other in beside if size_of(other.contender) == own_size] or beside
    return Rivals(
        _fastest(of_its_size),
        _fastest(other for other in of_its_size if "(fused attention)" in other.contender),
        _fastest(other for other in of_its_size if "(plain attention)" in other.contender),
    )


def _fastest(rows: Iterable[Row]) -> Row | None:
    timed = (row for row in rows if row.seconds is not None)
    return min(timed, key=lambda row: row.seconds, default=None)


def _compared_with(row: Row, baseline: str | None, among: Sequence[Row]) -> dict[str, Row | None]:
    """Heading → the row that the speed of `row` refers to."""
    if row.resolution is not None and baseline is None:
        return find_rivals(row, among)._asdict()
    return {"baseline": find_baseline(row, baseline or _default_baseline(among), among)}


def _default_baseline(among: Sequence[Row]) -> str:
    labels = list(dict.fromkeys(row.contender for row in among))
    return "dual" if "dual" in labels else labels[0]


def speed(row: Row, other: Row | None) -> str:
    """The speed of a row relative to another one, or "" without a measurement."""
    known = other is not None and None not in (other.seconds, row.seconds)
    return _figure(other.seconds / row.seconds) if known else ""


def describe(rows: Sequence[Row], baseline: str | None = None, *, kernels: bool = True) -> str:
    """One line on what the rows of one command have in common, and which kernels they ran."""
    row, run = rows[0], rows[0].run
    if baseline is None and row.resolution is None:
        baseline = _default_baseline(rows)
    isa = f", kernels for {run.instruction_set}" if run.instruction_set else ""
    where = f"{run.processor}, {run.cores} cores{isa}, {run.threads} threads"
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
        *machine_rates(row),
        versions,
        run.started,
        *([f"baseline: {baseline}"] if baseline else []),
        *(_kernels(rows) if kernels else []),
    ]
    return "; ".join(parts)


def machine_rates(row: Row) -> list[str]:
    """The machine's peak rates that were measured before the row, as one phrase or none."""
    rates = {
        "FMA peak": row.fma_macs_per_second,
        "best product float32": row.product_macs_per_second,
        "bfloat16": row.bfloat16_product_macs_per_second,
    }
    known = [f"{name} {2e-9 * rate:,.0f}" for name, rate in rates.items() if rate is not None]
    return [f"{', '.join(known)} GFLOP/s"] if known else []


def _kernels(rows: Sequence[Row]) -> list[str]:
    """The fused kernels that ran, one phrase for all contenders that ran the same ones."""
    sharing: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.kernels:
            sharing.setdefault(row.kernels, {})[row.contender] = None
    return [f"{', '.join(names)} ran {kernels}" for kernels, names in sharing.items()]


def _figure(value: float) -> str:
    """A value with three digits, or with all digits of its integer part."""
    if value == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 4)}f}"


def _mebibytes(count: int | None) -> str:
    return "" if count is None else f"{count / 2**20:,.1f}"


def _count(value: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= 0.9995 * size:  # which three digits round to 1
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}"
