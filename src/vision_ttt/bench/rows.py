"""One measurement as a row of a CSV file, with everything that is needed to repeat it."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args, get_type_hints

from vision_ttt.engine.csv_text import csv_text
from vision_ttt.errors import UserError
from vision_ttt.files import write_text

DECODE = "decode"
"""What is measured of a language model per token, after so many of them."""


@dataclass(frozen=True)
class Run:
    """The columns that are equal in all rows of one command."""

    started: str
    """The time of the start, UTC, ISO 8601."""
    command: str
    commit: str
    """The source tree's commit, with "-dirty" where it was changed; empty outside a checkout."""
    processor: str
    cores: int
    instruction_set: str
    """The instruction set of the compiled CPU kernels; empty where they are missing."""
    threads: int
    device_name: str
    python: str
    torch: str
    timm: str
    vision_ttt: str
    cuda: str = ""
    """torch's version of CUDA. This column and those below are empty for rows on a CPU."""
    driver: str = ""
    clocks: str = ""
    """The GPU's clocks before the run, and its power limit."""
    triton: str = ""
    flash_linear_attention: str = ""
    """Its version; empty where it is not installed."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender at one size. Columns that do not apply are None."""

    what: str
    """ops, models, train, dense or lm."""
    contender: str
    measured: str
    """inference, training step, forward, forward + backward; of dense models with adapter or
    backbone alone; of language models also prefill and decode."""
    resolution: int | None = None
    """Pixels along a side, the height of images that are not square; None for ops."""
    tokens: int | None = None
    heads: int | None = None
    dim: int | None = None
    mini_batch_size: int | None = None
    """This column and the three before are None for models. A language model has tokens: those of
    a call, or those before the one that is decoded."""
    batch_size: int
    device: str
    dtype: str
    compiled: bool
    seconds: float | None
    """The time of one call: the median over the repeats; None in case of a failure."""
    seconds_spread: float | None
    """Interquartile range over the repeats."""
    repeats: int
    macs: int
    """Multiply-adds: of a model's forward pass on one image, of an op's whole call."""
    peak_bytes: int | None = None
    """The peak memory of a call, without weights and inputs."""
    matmul_macs_per_second: float | None = None
    """The machine's rate of a matrix product, timed in turn with an op's contenders."""
    run: Run
    case: str = ""
    """The op, unless it is ttt_linear, or the inputs, unless they are a Vittt block's."""
    autocast: bool = False
    """Whether weights are float32 and autocast to the dtype. Otherwise they have the dtype."""
    kernels: str = ""
    """The fused kernels of a model that ran, separated by commas."""
    failure: str = ""
    """The reason why there is no measurement."""
    held_bytes: int | None = None
    """Memory that the first call of a model left in use, without its weights; of a language model
    what its sequences' states or keys and values take up after the call."""
    memory_runs: int = 0
    """The number of processes of which both memory columns are the median; 0 where they are of the
    timed process."""
    fma_macs_per_second: float | None = None
    """The machine's float32 multiply-adds in registers, measured before the run. This rate and
    those below are with all threads, see :mod:`vision_ttt.bench.rates`."""
    product_macs_per_second: float | None = None
    """The machine's best matrix product, float32."""
    bfloat16_product_macs_per_second: float | None = None
    """The machine's best matrix product, bfloat16."""
    width: int | None = None
    """Pixels, of images that are not square."""

    @property
    def size(self) -> int:
        """The number of tokens, or of pixels, which is proportional to it."""
        if self.resolution is None:
            return self.tokens
        return self.resolution * (self.width or self.resolution)

    @property
    def extent(self) -> int:
        """The size as it is displayed: tokens, or pixels along a side."""
        return self.tokens if self.resolution is None else self.resolution

    @property
    def per_second(self) -> float | None:
        """Images per second of a model, tokens per second and batch of an op or language model."""
        if self.seconds is None:
            return None
        one = self.tokens is None or self.measured == DECODE
        return self.batch_size * (1 if one else self.tokens) / self.seconds

    @property
    def matmul_share(self) -> float | None:
        """The ratio of the op's rate of multiply-adds to that of the machine's matrix product."""
        if self.matmul_macs_per_second is None or self.seconds is None:
            return None
        return self.macs / self.seconds / self.matmul_macs_per_second

    @property
    def fma_share(self) -> float | None:
        """The ratio of the op's rate of multiply-adds to the machine's in registers."""
        if self.fma_macs_per_second is None or self.seconds is None:
            return None
        return self.macs / self.seconds / self.fma_macs_per_second

    def cells(self) -> dict[str, Any]:
        """Column → value: the row's own fields, then those of its run."""
        cells = dataclasses.asdict(self)
        return cells | cells.pop("run")


_RUN_TYPES = get_type_hints(Run)
_ROW_TYPES = {name: kind for name, kind in get_type_hints(Row).items() if name != "run"}
COLUMNS = (*_ROW_TYPES, *_RUN_TYPES)
"""The columns of a file."""

# Columns that files of earlier versions lack. Their defaults apply to the rows of such files.
_ADDED = {
    field.name
    for field in (*dataclasses.fields(Row), *dataclasses.fields(Run))
    if field.default is not dataclasses.MISSING
}


def read_rows(path: Path) -> list[Row]:
    """Read a file that :func:`append_rows` wrote.

    Raises:
        UserError: the columns differ, or a cell is not a value of its column.
        OSError: the file cannot be read.
    """
    columns, lines = read_cells(path)
    if not set(COLUMNS) - _ADDED <= set(columns) <= set(COLUMNS):
        raise UserError(
            f"{path} is no file of measurements of this version: its columns are {list(columns)},"
            f" and must be {list(COLUMNS)}"
        )
    rows = []
    for number, cells in lines.items():
        try:
            run = Run(**_parse_all(cells, _RUN_TYPES))
            rows.append(Row(**_parse_all(cells, _ROW_TYPES), run=run))
        except ValueError as error:
            raise UserError(f"{path}, line {number}: {error}") from error
    return rows


def read_cells(path: Path) -> tuple[tuple[str, ...], dict[int, dict[str, str]]]:
    """Read the columns of a CSV file, and line number → cells of the row that ends there.

    Raises:
        UserError: the file is not text or not CSV, or a row has another number of cells.
        OSError: the file cannot be read.
    """
    rows = {}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            columns = tuple(reader.fieldnames or ())
            for cells in reader:
                # DictReader marks surplus and missing cells by None.
                if None in cells or None in cells.values():
                    raise UserError(f"{path}, line {reader.line_num}: not {len(columns)} cells")
                rows[reader.line_num] = cells
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is no CSV file: {error}") from error
    return columns, rows


def write_cells(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a CSV file, whole or not at all; its folder is made where missing.

    Raises:
        OSError: it cannot be written; its former content is kept.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, csv_text(columns, rows))


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Append rows to a CSV file atomically; create its folder and the file where missing.

    The new file replaces the old one after it has been written, so that a killed process loses no
    row. Two processes must not append to the same file at once.

    Raises:
        UserError: the file exists and is not a file of measurements.
        OSError: the file cannot be written. Its content is unchanged.
    """
    former = read_rows(path) if path.exists() else []
    write_cells(path, COLUMNS, (row.cells() for row in [*former, *rows]))


def find_baseline(row: Row, name: str, rows: Iterable[Row]) -> Row | None:
    """Find the row of the contender `name` with the command, pass, size and batch of `row`.

    Times of different commands are not comparable, because the commands did not run in turns.
    """
    place = attrgetter("run", "measured", "size", "batch_size")
    beside = (other for other in rows if place(other) == place(row))
    return next((other for other in beside if other.contender == name), None)


def _parse_all(cells: Mapping[str, str], types: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _parse(cells[name], kind) for name, kind in types.items() if name in cells}


def _parse(text: str, kind: Any) -> Any:
    if type(None) in get_args(kind):
        return None if text == "" else _parse(text, get_args(kind)[0])
    if kind is bool:
        if text not in ("True", "False"):
            raise ValueError(f"{text!r} is neither True nor False")
        return text == "True"
    return kind(text)
