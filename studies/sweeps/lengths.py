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
    seconds: Mapping[str, float | str],
    folder: Path,
    results: Sequence[Result] = (),
) -> dict[str, dict[str, float]]:
    """Row's name → "updates", with the "seconds" and "seconds_per_update" that they follow from.

    They are as many updates as the seconds allow, to the nearest. Paces are measured by
    :func:`studies.sweeps.paces.measure_paces`, of all rows that are not in the folder's file yet in
    turns; others may join later. A row that has results is as long as they are, on whatever machine
    they were trained and whatever the file says, and is not measured.

    Args:
        rows: name → its run, of any seed: of these rows, and of those whose seconds they have.
        seconds: name → those that are to be spent, or the name of the row whose seconds they are.
            Names that are not in `rows` are ignored.
        folder: of the sweep's runs; made where missing.
        results: of earlier runs, with any seeds, of these rows and others.

    Raises:
        UserError: the row whose seconds are to be spent has no result; as measure_paces does; the
            folder's file is damaged.
        OSError: the file cannot be written.
    """
    path = folder / LENGTHS_FILE
    updates = {result.row: result.curve["update"][-1] for result in results}
    spent = {result.row: result.seconds for result in results}
    lengths = _read(path)
    missing = []
    for name, own in seconds.items():
        if name not in rows:
            continue
        if isinstance(own, str) and own not in updates:
            raise UserError(
                f"the length of row {name!r} follows from the seconds of row {own!r}, which has no"
                f" finished run in {folder}; train it, too"
            )
        if name in updates:
            taken = spent[name] if isinstance(own, str) else own
            lengths[name] = _length(updates[name], taken)
        elif name not in lengths:
            missing.append(name)
    if missing:
        others = (own for own in map(seconds.get, missing) if isinstance(own, str))
        paces = measure_paces({name: rows[name] for name in dict.fromkeys([*missing, *others])})
        for name in missing:
            own = seconds[name]
            taken = updates[own] * paces[own] if isinstance(own, str) else own
            lengths[name] = _length(max(1, round(taken / paces[name])), taken, paces[name])
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
