"""What deletion and insertion gave: a row of a CSV file per checkpoint, method and fill."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from studies.deletion.study import MapCurves
from vision_ttt.bench.rows import Run, read_cells, write_cells
from vision_ttt.errors import UserError


@dataclass(frozen=True)
class DeletionResult:
    """The curves of one checkpoint's model by one method with one fill."""

    data: str
    """Name of the data set, as the checkpoint has it."""
    model: str
    checkpoint: str
    """As it was given."""
    seed: int | None
    """Of the checkpoint's training; None where its run's config is not beside it."""
    images: int
    tokens: int
    """Of an image."""
    curves: MapCurves
    run: Run
    """Where, when and with what."""

    def cells(self) -> dict[str, Any]:
        """The result flat, column name → value; the curves as JSON beside their areas."""
        own = {name: getattr(self, name) for name in _OWN_TYPES}
        areas = {name: getattr(self.curves, name) for name in _AREAS}
        told = {name: getattr(self.curves, name) for name in _TOLD_TYPES}
        heights = {
            name: json.dumps([float(f"{each:.6g}") for each in getattr(self.curves, name)])
            for name in _HEIGHTS
        }
        return own | told | areas | heights | dataclasses.asdict(self.run)


_OWN_TYPES = {
    **dict.fromkeys(("data", "model", "checkpoint"), str),
    **dict.fromkeys(("seed", "images", "tokens"), int),
}
_TOLD_TYPES = {"method": str, "fill": str, "draws": int}
_AREAS = ("deletion_area", "insertion_area")
_HEIGHTS = ("shares", "deletion", "insertion")
_RUN_TYPES = get_type_hints(Run)
COLUMNS = (*_OWN_TYPES, *_TOLD_TYPES, *_AREAS, *_HEIGHTS, *_RUN_TYPES)


def write_deletion_results(path: Path, results: Iterable[DeletionResult]) -> None:
    """Write a CSV file, whole or not at all; its folder is made where missing.

    Raises:
        OSError: it cannot be written; its former content is kept.
    """
    write_cells(path, COLUMNS, (result.cells() for result in results))


def read_deletion_results(path: Path) -> list[DeletionResult]:
    """Read a file that :func:`write_deletion_results` wrote.

    Raises:
        UserError: the columns are others, or a cell is not a value of its column.
        OSError: the file cannot be read.
    """
    columns, lines = read_cells(path)
    if columns != COLUMNS:
        raise UserError(
            f"{path} is no file of deletion and insertion: its columns are {list(columns)}, and "
            f"must be {list(COLUMNS)}"
        )
    results = []
    for number, cells in lines.items():
        try:
            results.append(_from_cells(cells))
        except (ValueError, TypeError) as error:
            raise UserError(f"{path}, line {number}: {error}") from error
    return results


def _from_cells(cells: dict[str, str]) -> DeletionResult:
    own = {name: kind(cells[name]) for name, kind in _OWN_TYPES.items() if cells[name]}
    told = {name: kind(cells[name]) for name, kind in _TOLD_TYPES.items()}
    heights = {name: tuple(map(float, json.loads(cells[name]))) for name in _HEIGHTS}
    run = Run(**{name: kind(cells[name]) for name, kind in _RUN_TYPES.items()})
    return DeletionResult(**{"seed": None, **own}, curves=MapCurves(**told, **heights), run=run)
