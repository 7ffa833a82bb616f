"""Which of many rows count: the newest of each measurement, and those of one figure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vision_ttt.bench.rows import Row


def newest(rows: Iterable[Row]) -> list[Row]:
    """The last of the rows with the same settings, for all settings, in the order of the rows."""
    last = {_settings(row): row for row in rows}
    return [row for row in rows if last[_settings(row)] is row]


def comparable(rows: Sequence[Row]) -> list[Row]:
    """The rows of one figure: measured in the same circumstances, at the most sizes.

    Of circumstances with as many sizes they are the last row's.
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in reversed(rows):
        groups.setdefault(_circumstances(row), []).insert(0, row)
    return max(groups.values(), key=lambda own: len({row.extent for row in own}))


def _circumstances(row: Row) -> tuple[Any, ...]:
    """The columns that must be equal for rows of one figure."""
    run = row.run
    return (
        *(row.what, row.heads, row.dim, row.mini_batch_size, row.batch_size),
        *(row.device, row.dtype, row.compiled, row.case, row.autocast),
        *(run.processor, run.cores, run.threads, run.device_name),
    )


def _settings(row: Row) -> tuple[Any, ...]:
    """The key of a measurement: a newer row with the same key replaces an older one."""
    own = (row.contender, row.measured, row.resolution, row.width, row.tokens)
    return *own, *_circumstances(row)
