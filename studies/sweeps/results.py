"""What the runs of a sweep gave: a row of a CSV file each, with all that repeating it needs."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from vision_ttt.bench.rows import Run, read_cells, write_cells
from vision_ttt.engine import TrainConfig
from vision_ttt.engine.run_directory import differences
from vision_ttt.errors import UserError
from vision_ttt.files import write_text

RESULT_FILE = "result.json"
"""In a run's directory, written when it is finished: its config and its :class:`Result`."""


@dataclass(frozen=True)
class Result:
    """One finished training run of a sweep."""

    sweep: str
    row: str
    seed: int
    model: str
    model_args: str
    """JSON."""
    epochs: float
    train_images: int
    """Training images; of a language model tokens."""
    test_images: int
    """Test images; of a language model tokens."""
    parameters: int
    macs: int
    """Multiply-adds of a forward pass on one image, or on one sequence of tokens."""
    test_accuracy: float
    """From 0 to 1, after the last epoch; of a sweep of segmenters mean IoU; NaN of a row that
    measures none."""
    test_loss: float
    """Cross-entropy in nats, without label smoothing."""
    train_loss: float
    """Mean over the last epoch, of what is minimised: with label smoothing and augmentation."""
    seconds: float
    """Of training, evaluations left out; other runs were computing beside it."""
    run: Run
    """Where, when and with what."""
    history: str = "{}"
    """JSON, a list for each of HISTORY: its value at every evaluation. Empty in files of earlier
    versions."""
    measures: str = "{}"
    """JSON: what the sweep's `examine` returned."""

    @property
    def curve(self) -> dict[str, list[float]]:
        """The history: a list for each of HISTORY.

        Raises:
            UserError: the result has none.
        """
        curve = json.loads(self.history)
        if not curve:
            raise UserError(f"the result of row {self.row!r}, seed {self.seed}, has no history")
        return curve

    @property
    def measured(self) -> dict[str, Any]:
        """What the sweep's `examine` returned.

        Raises:
            UserError: the result has none.
        """
        measured = json.loads(self.measures)
        if not measured:
            raise UserError(f"the result of row {self.row!r}, seed {self.seed}, has no measures")
        return measured

    def cells(self) -> dict[str, Any]:
        """The result flat, column name → value: its own fields, then those of its run."""
        cells = dataclasses.asdict(self)
        return cells | cells.pop("run")


HISTORY = ("update", "epoch", "seconds", "test_loss", "test_accuracy")
"""What :attr:`Result.history` holds; seconds are those of training from the run's beginning."""

_RUN_TYPES = get_type_hints(Run)
_OWN_TYPES = {name: kind for name, kind in get_type_hints(Result).items() if name != "run"}
COLUMNS = (*_OWN_TYPES, *_RUN_TYPES)
_ADDED = {"history", "measures"}  # files of earlier versions lack them


def save_result(config: TrainConfig, result: Result) -> None:
    """Write the result into its run's directory: from now on the run counts as finished."""
    text = json.dumps({"config": config.as_dict(), "result": result.cells()}, indent=2)
    write_text(Path(config.run.output) / RESULT_FILE, text + "\n")


def finished(config: TrainConfig) -> Result | None:
    """The result of this very run where it is finished, else None."""
    path = Path(config.run.output) / RESULT_FILE
    if not path.is_file():
        return None
    saved = json.loads(path.read_text(encoding="utf-8"))
    # The folder may be moved, and with it the weights that a row starts from.
    ignored = {"run.output"}
    if _start(saved["config"]) == _start(config.as_dict()):
        ignored.add("model.initial_weights")
    if differences(saved["config"], config, besides=ignored):
        return None
    return _from_cells(saved["result"])


def _start(config: Mapping[str, Any]) -> str | None:
    """The path from a run's directory to the weights that it starts from."""
    weights = config["model"]["initial_weights"]
    return weights and os.path.relpath(weights, config["run"]["output"])


def write_results(path: Path, results: Iterable[Result]) -> None:
    """Write a CSV file, whole or not at all; its folder is made where missing.

    Raises:
        OSError: it cannot be written; its former content is kept.
    """
    write_cells(path, COLUMNS, (result.cells() for result in results))


def read_results(path: Path) -> list[Result]:
    """Read a file that :func:`write_results` wrote.

    Raises:
        UserError: the columns are others, or a cell is not a value of its column.
        OSError: the file cannot be read.
    """
    columns, lines = read_cells(path)
    if set(COLUMNS) - set(columns) - _ADDED or set(columns) - set(COLUMNS):
        raise UserError(
            f"{path} is no file of a sweep's results: its columns are {list(columns)}, and must be"
            f" {list(COLUMNS)}"
        )
    results = []
    for number, cells in lines.items():
        try:
            results.append(_from_cells(cells))
        except ValueError as error:
            raise UserError(f"{path}, line {number}: {error}") from error
    return results


def _from_cells(cells: dict[str, Any]) -> Result:
    own = {name: kind(cells[name]) for name, kind in _OWN_TYPES.items() if name in cells}
    run = {name: kind(cells[name]) for name, kind in _RUN_TYPES.items()}
    return Result(**own, run=Run(**run))
