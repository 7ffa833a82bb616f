"""A sweep's results as a table: mean and spread over seeds, beside the paper's own figure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

from studies.spread import Spread
from studies.sweeps.definition import Column, SameSeconds, ShareOfUpdates, Sweep
from studies.sweeps.results import Result
from vision_ttt.bench.tables import Table
from vision_ttt.errors import UserError, suggestions

ACCURACIES = {"test_accuracy": "test accuracy", "test_miou": "test mean IoU"}
"""A sweep's `accuracy` → what tables and messages call it."""


def by_row(sweep: Sweep, results: Sequence[Result]) -> dict[str, list[Result]]:
    """The results of each row, by seed; rows without any are left out.

    Raises:
        UserError: there are none, a result is not of this sweep, or a row has a seed twice.
    """
    if not results:
        raise UserError(f"there are no results of sweep {sweep.name}")
    rows: dict[str, list[Result]] = {}
    for result in results:
        if result.sweep != sweep.name or result.row not in sweep.by_name:
            raise UserError(
                f"row {result.row!r} of sweep {result.sweep!r} is not of {sweep.name}; "
                f"{suggestions(result.row, sweep.by_name)}"
            )
        own = rows.setdefault(result.row, [])
        if any(other.seed == result.seed for other in own):
            raise UserError(f"row {result.row!r} has two results with seed {result.seed}")
        own.append(result)
    return {name: sorted(own, key=lambda result: result.seed) for name, own in rows.items()}


def in_order(sweep: Sweep, results: Sequence[Result]) -> list[Result]:
    """The results by row, in the sweep's order, then by seed."""
    places = {name: place for place, name in enumerate(sweep.by_name)}
    return sorted(results, key=lambda result: (places[result.row], result.seed))


def tabulate(sweep: Sweep, results: Sequence[Result], panel: int) -> Table:
    """One panel as a table; rows without results, and columns that none of them has, are left out.

    Raises:
        UserError: as for :func:`by_row`.
    """
    found = by_row(sweep, results)
    title, rows = sweep.panels[panel].title, sweep.panels[panel].rows
    shows_published = any(sweep.by_name[name].published is not None for name in rows.values())
    headings = [title, "row", "parameters", "MACs", "test loss", f"{ACCURACIES[sweep.accuracy]}, %"]
    shown = [result for name in rows.values() for result in found.get(name, ())]
    columns = [
        column
        for column in sweep.columns
        if not all(math.isnan(value) for value in values_of(column, shown, found))
    ]
    headings += ["train loss", *(column.heading for column in columns)]
    headings += ["seeds", *(["published"] if shows_published else [])]
    lines = []
    for label, name in rows.items():
        if name not in found:
            continue
        own = found[name]
        line = [
            label,
            name,
            f"{own[0].parameters:,}",
            f"{own[0].macs / 1e6:.1f}M",
            Spread.of([result.test_loss for result in own]).text(3),
            Spread.of([100 * result.test_accuracy for result in own]).text(1),
            Spread.of([result.train_loss for result in own]).text(3),
            *(_cell(column, own, found) for column in columns),
            ", ".join(str(result.seed) for result in own),
        ]
        if shows_published:
            published = sweep.by_name[name].published
            line.append("" if published is None else f"{published:.1f}")
        lines.append(line)
    return Table(headings, lines)


def _cell(column: Column, results: Sequence[Result], found: Mapping[str, Sequence[Result]]) -> str:
    """A column's values over seeds, as text."""
    values = values_of(column, results, found)
    if column.is_time and len({_machine(result) for result in results}) > 1:
        return " / ".join(f"{value:.{column.decimals}f}" for value in values)
    return Spread.of(values).text(column.decimals)


def all_tables(sweep: Sweep, results: Sequence[Result]) -> list[Table]:
    """The sweep's own tables, then those of :meth:`Sweep.panels_of`; empty ones are left out.

    Raises:
        UserError: as for :func:`by_row`.
    """
    own = [] if sweep.tables is None else sweep.tables(sweep, results)
    panels = [
        tabulate(sweep, results, panel) for panel in sweep.panels_of(by_row(sweep, results).keys())
    ]
    return [table for table in (*own, *panels) if table.lines]


def values_of(
    column: Column, results: Sequence[Result], found: Mapping[str, Sequence[Result]]
) -> list[float]:
    """A column's values; NaN where the run that they are relative to is missing.

    Args:
        found: the results of each row, as of :func:`by_row`.
    """
    if column.relative_to is None:
        return [column.value(result) for result in results]
    whole = {other.seed: column.value(other) for other in found.get(column.relative_to, ())}
    return [100 * column.value(each) / whole.get(each.seed, math.nan) for each in results]


def describe(sweep: Sweep, results: Sequence[Result]) -> str:
    """What the numbers are and where they come from, in one paragraph.

    The rows of the results have each run's command and commit.
    """
    epochs = sorted({result.epochs for result in results})
    trained, tested = (
        _range(sorted({getattr(result, f"{part}_images") for result in results}), ",")
        for part in ("train", "test")
    )
    started = sorted(result.run.started for result in results)
    parts = [
        f"`sweep {sweep.name}`, mean ± sample standard deviation over seeds; {_range(epochs)}"
        f" epochs of {trained} training {sweep.unit}; test loss is cross-entropy in nats on"
        f" {tested} test {sweep.unit}, {sweep.losses}",
        *([f"published: the paper's own {sweep.published_unit}"] if sweep.published_unit else []),
        f"{_machines(results)}, one thread a run",
        ", ".join(
            f"{name} {' and '.join(sorted({getattr(each.run, field) for each in results}))}"
            for name, field in _PACKAGES.items()
        ),
        f"{started[0]} to {started[-1]}",
    ]
    notes = [f"`{row.name}`: {row.note}." for row in sweep.rows if row.note]
    return " ".join([f"{'; '.join(parts)}. {sweep.caveat}", *notes])


_PACKAGES = {"torch": "torch", "timm": "timm", "vision-ttt": "vision_ttt"}


def _machine(result: Result) -> str:
    """Its processor; those of one name differ in their instruction sets."""
    run = result.run
    return f"{run.device_name} ({run.instruction_set})" if run.instruction_set else run.device_name


def _machines(results: Sequence[Result]) -> str:
    """Each machine's name, with the seeds of its runs where there are several machines."""
    seeds: dict[str, set[int]] = {}
    for result in results:
        seeds.setdefault(_machine(result), set()).add(result.seed)
    if len(seeds) == 1:
        return next(iter(seeds))
    return " and ".join(
        f"{name} (seed {', '.join(map(str, sorted(own)))})" for name, own in seeds.items()
    )


def markdown(sweep: Sweep, results: Sequence[Result]) -> str:
    """The whole sweep in GitHub's Markdown: its description, then all tables.

    Raises:
        UserError: as for :func:`by_row`.
    """
    parts = []
    for headings, lines in all_tables(sweep, results):
        rule = ["---", "---", *("---:" for _ in headings[2:])]
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in (headings, rule, *lines)))
    return "\n\n".join([describe(sweep, results), *parts])


def changes(sweep: Sweep, name: str) -> str:
    """What a row changes, for the list of rows: e.g. "design=dual"."""
    values = dict(sweep.by_name[name].changes)
    values |= values.pop("arguments", {})
    if sweep.by_name[name].recipe is not None:
        values["recipe"] = sweep.by_name[name].recipe
    length, start = sweep.by_name[name].length, sweep.by_name[name].start
    if start is not None:
        values["initial_weights"] = f"those of {start}"
    if isinstance(length, SameSeconds):
        values["seconds"] = f"those of {length.row}"
    elif isinstance(length, ShareOfUpdates):
        values["updates"] = f"{length.share:.0%} of those of {length.row}"
    elif length is not None:
        values["seconds"] = length.seconds
    return ", ".join(f"{key}={_plain(value)}" for key, value in values.items()) or "nothing"


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _range(numbers: Sequence[float], form: str = "g") -> str:
    """E.g. "2", or "2 to 5.13" of ascending numbers."""
    return " to ".join(f"{number:{form}}" for number in dict.fromkeys((numbers[0], numbers[-1])))
