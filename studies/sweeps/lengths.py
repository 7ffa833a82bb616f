"""How many updates fit into a row's seconds: measured once, then written down."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from studies.sweeps.definition import ShareOfUpdates, Variant
from studies.sweeps.paces import measure_paces
from studies.sweeps.results import Result
from vision_ttt.engine import TrainConfig
from vision_ttt.errors import UserError
from vision_ttt.file_kinds import read_regular
from vision_ttt.files import write_text

LENGTHS_FILE = "lengths.json"
"""In the folder of a sweep's runs."""


def same_seconds(
    rows: Mapping[str, TrainConfig],
    others: Mapping[str, str],
    folder: Path,
    results: Sequence[Result],
) -> dict[str, dict[str, float]]:
    """Row's name → "updates", with the "seconds" and "seconds_per_update" that they follow from.

    They are as many updates as fit into the time of another row's. Both paces are measured by
    :func:`studies.sweeps.paces.measure_paces`, all rows in turns. What is known is kept in the
    folder and not measured again: other seeds that join later train for the same length. A row that
    has results is as long as they are.

    Args:
        rows: name → its run, of any seed, of these rows and the others.
        others: name → the row whose seconds it has.
        folder: of the sweep's runs; made where missing.
        results: of finished runs, with any seeds, of these rows and others.

    Raises:
        UserError: another row has no result; as measure_paces does; the folder's file is damaged.
        OSError: the file cannot be written.
    """
    path = folder / LENGTHS_FILE
    lengths = _read(path)
    updates = {result.row: result.curve["update"][-1] for result in results}
    missing = {}
    for name, other in others.items():
        if other not in updates:
            raise UserError(
                f"the length of row {name!r} follows from the seconds of row {other!r}, which has"
                f" no finished run in {folder}; train it, too"
            )
        if name not in lengths:
            missing[name] = other
    if missing:
        needed = dict.fromkeys([*missing, *missing.values()])
        paces = measure_paces({name: rows[name] for name in needed})
        for name, other in missing.items():
            seconds = updates[other] * paces[other]
            count = updates.get(name, max(1, round(seconds / paces[name])))
            lengths[name] = _length(count, seconds, paces[name])
        _write(path, lengths)
    return lengths


def shares_of_updates(rows: Sequence[Variant], results: Sequence[Result]) -> dict[str, int]:
    """Row's name → updates, of rows whose length is a share of another row's.

    Raises:
        UserError: there is no result of that other row.
    """
    updates = {result.row: result.curve["update"][-1] for result in results}
    lengths = {row.name: row.length for row in rows if isinstance(row.length, ShareOfUpdates)}
    for name, length in lengths.items():
        if length.row not in updates:
            raise UserError(
                f"the length of row {name!r} follows from row {length.row!r}, which has no"
                " finished run; train it, too"
            )
    return {name: max(1, round(own.share * updates[own.row])) for name, own in lengths.items()}


def lengths_by_pace(
    rows: Mapping[str, TrainConfig],
    seconds: Mapping[str, float],
    folder: Path,
    results: Sequence[Result] = (),
) -> dict[str, dict[str, float]]:
    """As :func:`same_seconds`, of rows whose seconds are given.

    Rows of pictures of other sizes may join later. A row that has results is as long as they are,
    on whatever machine they were trained and whatever the file says.

    Args:
        rows: name → its run, of any seed.
        seconds: name → those that are to be spent.
        folder: of the sweep's runs; made where missing.
        results: of earlier runs, with any seeds, of these rows and others.

    Raises:
        UserError: as measure_paces does; the folder's file is damaged.
        OSError: the file cannot be written.
    """
    path = folder / LENGTHS_FILE
    lengths = _read(path) | {
        result.row: _length(result.curve["update"][-1], seconds[result.row])
        for result in results
        if result.row in rows
    }
    missing = {name: config for name, config in rows.items() if name not in lengths}
    if missing:
        for name, pace in measure_paces(missing).items():
            lengths[name] = _length(max(1, int(seconds[name] / pace)), seconds[name], pace)
    _write(path, lengths)
    return lengths


def _length(updates: int, seconds: float, pace: float | None = None) -> dict[str, float]:
    """An entry of the folder's file; without a pace, the one that the two others give."""
    pace = seconds / updates if pace is None else pace
    return {"updates": updates, "seconds": seconds, "seconds_per_update": pace}


def of_updates(updates: int, config: TrainConfig) -> dict[str, Any]:
    """The fields that make a run this long, its warm-up the same share of it as in ``config``.

    Where that has evaluations after so many updates, and its length is in updates, too, there are
    as many of them in the new length.
    """
    unit, length = config.optimisation.length
    fields = {"updates": updates, "warmup": config.optimisation.warmup / length * updates}
    every = config.run.evaluate_every
    if every is not None and unit == "updates":
        fields["evaluate_every"] = max(math.ceil(every / length * updates), 1)
    return fields


def _write(path: Path, lengths: Mapping[str, Mapping[str, float]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(lengths, indent=2) + "\n")


def _read(path: Path) -> dict[str, dict[str, float]]:
    if not path.exists():
        return {}
    try:
        return json.loads(read_regular(path, 2**20))
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); remove it to measure anew") from error
