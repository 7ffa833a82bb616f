"""One session of measuring: behind a progress bar, its rows kept and shown."""

import dataclasses
import json
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import jsonargparse
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from vision_ttt.bench.machine import describe_run
from vision_ttt.bench.memory import can_measure
from vision_ttt.bench.protocol import Advance, Settings
from vision_ttt.bench.rates import Rates, measure_rates
from vision_ttt.bench.rows import Row, Run, append_rows
from vision_ttt.bench.tables import describe, tabulate
from vision_ttt.cli.plain_console import plain_console
from vision_ttt.cli.wide_table import print_figures
from vision_ttt.errors import UserError

_log = logging.getLogger(__name__)


def check_session(arguments: jsonargparse.Namespace) -> None:
    """Raise UserError where the device is not there."""
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device is cuda, but torch finds no GPU here; accepted: cpu")


def settings_of(
    arguments: jsonargparse.Namespace, batch_size: int, memory_runs: int = 0
) -> Settings:
    """How the arguments ask to measure."""
    return Settings(
        device=torch.device(arguments.device),
        dtype=getattr(torch, arguments.dtype),
        batch_size=batch_size,
        compiled=arguments.compile,
        repeats=arguments.repeats,
        longest_call=math.inf if arguments.max_seconds is None else arguments.max_seconds,
        memory_runs=memory_runs,
    )


def check_measured(argument: str, name: str | None, labels: Iterable[str]) -> None:
    """Raise UserError where an argument names a contender that is not among the labels."""
    accepted = list(dict.fromkeys(labels))
    if name is not None and name not in accepted:
        raise UserError(f"{argument} {name!r} is not measured; accepted: {', '.join(accepted)}")


def measure_and_show(
    arguments: jsonargparse.Namespace,
    settings: Settings,
    steps: int,
    measure: Callable[[Run, Advance], Iterable[list[Row]]],
    remark: Callable[[Sequence[Row]], Iterable[str]] = lambda _rows: (),
) -> None:
    """Measure behind a progress bar, keep every row as soon as it is there, and show all.

    Args:
        remark: sentences on the rows, to be printed below their table.
    """
    path = Path(arguments.output or f"benchmarks/results/{arguments.what}-{arguments.device}.csv")
    append_rows(path, [])  # what cannot be written is refused before anything is measured
    if not can_measure(settings.device):
        _log.info("memory is not measured: on a CPU this requires Linux")
    # The GPU's rates are its makers'.
    rates = (measure_rates() if settings.device.type == "cpu" else Rates())._asdict()
    rows: list[Row] = []
    with _progress(steps) as advance:
        for measured in measure(describe_run(arguments.command, settings.device), advance):
            measured = [dataclasses.replace(row, **rates) for row in measured]
            append_rows(path, measured)
            rows += measured
    console = plain_console()
    if arguments.json:
        answer = {"rows": [row.cells() for row in rows]}
        console.print_json(json.dumps(answer), highlight=False)
        return
    headings, lines = tabulate(rows, arguments.baseline)
    caption = describe(rows, arguments.baseline)
    print_figures(headings, lines, title=f"bench {rows[0].what}", caption=caption)
    for sentence in remark(rows):
        console.say(sentence)


@contextmanager
def _progress(steps: int) -> Iterator[Advance]:
    bar = Progress(
        TextColumn("measuring"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed}/{task.total} {task.description}"),
        TimeRemainingColumn(),
        console=plain_console(stderr=True),
        refresh_per_second=2,  # rarely: the processor is being measured
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task("", total=steps)
        yield lambda name: bar.update(task, advance=1, description=name)


@contextmanager
def using_threads(count: int | None) -> Iterator[None]:
    """Let torch compute with so many threads inside the block; None leaves it alone."""
    former = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(former)
