"""One measurement as a row of a CSV file, with all that is needed to judge and repeat it."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from vision_ttt.engine.files import write_text
from vision_ttt.errors import UserError


@dataclass(frozen=True)
class Run:
    """What the rows measured by one command have in common."""

    started: str
    """UTC, ISO 8601."""
    command: str
    commit: str
    """Of the source tree, with "-dirty" where it was changed; empty outside a checkout."""
    processor: str
    cores: int
    instruction_set: str
    """That of the compiled CPU kernels; empty where they are missing."""
    threads: int
    device_name: str
    python: str
    torch: str
    timm: str
    vision_ttt: str
    cuda: str = ""
    """torch's; this and those below for rows on a GPU, else empty."""
    driver: str = ""
    clocks: str = ""
    """Of the GPU before the run, and its power limit."""
    triton: str = ""
    flash_linear_attention: str = ""
    """Empty, too, where it is not installed."""


@dataclass(frozen=True)
class Row:
    """One contender at one size. What a measurement does not have is None."""

    what: str
    """ops, models or train."""
    contender: str
    measured: str
    """inference, training step, forward, or forward + backward."""
    resolution: int | None
    """Pixels along a side; for models."""
    tokens: int | None
    heads: int | None
    dim: int | None
    mini_batch_size: int | None
    """This and the three before: for ops."""
    batch_size: int
    device: str
    dtype: str
    compiled: bool
    seconds: float | None
    """Of one call: median over the repeats; None where there is a failure."""
    seconds_spread: float | None
    """Interquartile range over the repeats."""
    repeats: int
    macs: int
    """Multiply-adds: of a model's forward pass on one image, of an op's whole call."""
    peak_bytes: int | None
    """Memory of a call above weights and inputs."""
    matmul_macs_per_second: float | None
    """The machine's rate of a matrix product in the same interleaving; for ops."""
    run: Run
    case: str = ""
    """What is special about an op's call: an op other than ttt_linear, or inputs other than a Vittt
    block's."""
    autocast: bool = False
    """Weights are float32 and autocast to the dtype; otherwise they are of the dtype."""
    kernels: str = ""
    """Of a model: the fused kernels that ran, separated by commas."""
    failure: str = ""
    """Why nothing was measured."""
    held_bytes: int | None = None
    """Memory that the first call of a model left in use, beside its weights."""
    memory_runs: int = 0
    """The processes whose median both figures of memory are; 0: the process that was timed."""
    fma_macs_per_second: float | None = None
    """The machine's float32 multiply-adds on registers alone, before the run; this and those below
    with all threads, see :mod:`vision_ttt.bench.rates`."""
    product_macs_per_second: float | None = None
    """Its best matrix product, float32."""
    bfloat16_product_macs_per_second: float | None = None

    @property
    def size(self) -> int:
        """What cost grows with: tokens, or pixels, which are proportional to them."""
        return self.tokens if self.resolution is None else self.resolution**2

    @property
    def extent(self) -> int:
        """The size as one names it: tokens, or pixels along a side."""
        return self.tokens if self.resolution is None else self.resolution

    @property
    def per_second(self) -> float | None:
        """Images per second of a model, tokens per second and batch of an op."""
        if self.seconds is None:
            return None
        return self.batch_size * (1 if self.tokens is None else self.tokens) / self.seconds

    @property
    def matmul_share(self) -> float | None:
        """The op's rate of multiply-adds over that of the machine's matrix product."""
        if self.matmul_macs_per_second is None or self.seconds is None:
            return None
        return self.macs / self.seconds / self.matmul_macs_per_second

    @property
    def fma_share(self) -> float | None:
        """The op's rate of multiply-adds over the machine's on registers alone."""
        if self.fma_macs_per_second is None or self.seconds is None:
            return None
        return self.macs / self.seconds / self.fma_macs_per_second

    @property
    def circumstances(self) -> tuple[Any, ...]:
        """What must be the same for rows to stand in one picture."""
        run = self.run
        return (
            *(self.what, self.heads, self.dim, self.mini_batch_size, self.batch_size),
            *(self.device, self.dtype, self.compiled, self.case, self.autocast),
            *(run.processor, run.cores, run.threads, run.device_name),
        )

    @property
    def settings(self) -> tuple[Any, ...]:
        """What was measured and where: a newer row with the same settings replaces an older."""
        own = (self.contender, self.measured, self.resolution, self.tokens)
        return *own, *self.circumstances

    def cells(self) -> dict[str, Any]:
        """The row flat, column name → value: its own fields, then those of its run."""
        cells = dataclasses.asdict(self)
        return cells | cells.pop("run")


_RUN_TYPES = get_type_hints(Run)
_ROW_TYPES = {name: kind for name, kind in get_type_hints(Row).items() if name != "run"}
COLUMNS = (*_ROW_TYPES, *_RUN_TYPES)

# Columns that files of former versions lack; what they would say of those rows is the default.
_ADDED = {
    field.name
    for field in (*dataclasses.fields(Row), *dataclasses.fields(Run))
    if field.default is not dataclasses.MISSING
}


def read_rows(path: Path) -> list[Row]:
    """Read a file that :func:`append_rows` wrote.

    Raises:
        UserError: the columns are others, or a cell is not a value of its column.
        OSError: the file cannot be read.
    """
    columns, lines = read_cells(path)
    if not set(COLUMNS) - _ADDED <= set(columns) <= set(COLUMNS):
        raise UserError(
            f"{path} is no file of measurements by this version: its columns are {list(columns)},"
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
    """The columns of a CSV file, and its rows' cells by the number of the line they end on.

    Raises:
        UserError: it is no text, no CSV file, or a row has other cells than the first.
        OSError: it cannot be read.
    """
    rows = {}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            columns = tuple(reader.fieldnames or ())
            for cells in reader:
                # DictReader's sign of too many or too few.
                if None in cells or None in cells.values():
                    raise UserError(f"{path}, line {reader.line_num}: not {len(columns)} cells")
                rows[reader.line_num] = cells
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is no CSV file: {error}") from error
    return columns, rows


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Add rows to a CSV file, whole or not at all; folder and file are made where missing.

    The file is written anew and put in place of the old one, so that being killed at any moment
    loses no row. Two processes must not append to the same file at once.

    Raises:
        UserError: the file is there and is no file of measurements.
        OSError: it cannot be written; its former content is kept.
    """
    former = read_rows(path) if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    table = io.StringIO()
    writer = csv.DictWriter(table, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(row.cells() for row in [*former, *rows])
    write_text(path, table.getvalue())


def newest(rows: Iterable[Row]) -> list[Row]:
    """The last row of each settings, in the order of the rows."""
    last = {row.settings: row for row in rows}
    return [row for row in rows if last[row.settings] is row]


def comparable(rows: Sequence[Row]) -> list[Row]:
    """The rows measured in the last row's circumstances."""
    return [row for row in rows if row.circumstances == rows[-1].circumstances]


def find_baseline(row: Row, name: str, rows: Iterable[Row]) -> Row | None:
    """The row of the contender `name` that `row` may be compared with: same command, pass, size.

    Times of different commands do not compare, for their contenders took no turns.
    """
    beside = (row.run, row.measured, row.size)
    own = (other for other in rows if (other.run, other.measured, other.size) == beside)
    return next((other for other in own if other.contender == name), None)


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
