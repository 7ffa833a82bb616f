"""What a finished training run is shown by: a page in its directory, a table on the terminal."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from vision_ttt.cli.wide_table import print_whole
from vision_ttt.engine.checkpoint import WEIGHTS_FILE
from vision_ttt.engine.config import TrainConfig
from vision_ttt.engine.metrics import rate_name
from vision_ttt.engine.run_directory import is_finished
from vision_ttt.engine.task import Report
from vision_ttt.engine.train import TrainResult
from vision_ttt.explain.report import render_report
from vision_ttt.files import write_text

_PAGE = "report.html"
_LONG_WAIT = 0.2
"""Share of a run's time that waiting for data should not take."""


def is_reported(config: TrainConfig) -> bool:
    """Return whether a run is finished and its report is written.

    Raises:
        ConfigError: it is finished, but is a run of another config.
    """
    return is_finished(config) and Path(config.run.output, _PAGE).is_file()


def report(result: TrainResult) -> None:
    """Write a run's pictures and its page, and print its figures."""
    own = result.task.report(result)
    page = write_page(result, own)
    _print_summary(result, own, page)


def write_page(result: TrainResult, own: Report) -> Path:
    """Write report.html into the run's directory and return its path.

    Args:
        own: the task's part of it.
    """
    metrics = result.metrics
    description = dict(result.task.described())
    name = description.pop("dataset")
    numbers = [f"{count:,} {what.replace('_', ' ')}" for what, count in description.items()]
    summary = {
        **own.measured,
        "model": f"{metrics['model']}, {metrics['parameters']:,} parameters",
        "data": ": ".join(filter(None, (name, ", ".join(numbers)))),
        "epochs": f"{metrics['history'][-1]['epoch']:g}",
        "training time": f"{metrics['seconds']:.0f} s",
        "seed": str(metrics["seed"]),
        "versions": ", ".join(f"{name} {version}" for name, version in metrics["versions"].items()),
    }
    configuration = (result.run_dir / "config.yaml").read_text(encoding="utf-8")
    page = result.run_dir / _PAGE
    content = render_report(
        _title(metrics), summary, list(own.sections), configuration, own.tables, own.texts
    )
    write_text(page, content)
    return page


def _print_summary(result: TrainResult, own: Report, page: Path) -> None:
    metrics, task = result.metrics, result.task
    last = metrics["history"][-1]
    table = Table(title=_title(metrics), show_header=False)
    for name, figure in own.measured.items():
        table.add_row(name, figure)
    table.add_row("parameters", f"{metrics['parameters']:,}")
    table.add_row("epochs", f"{last['epoch']:g}")
    table.add_row("training time", f"{metrics['seconds']:.0f} s")
    table.add_row(f"{task.unit} per second", f"{last[rate_name(task)]:.0f}")
    table.add_row("data wait", data_wait(last["data_share"], result.config.machine.num_workers))
    table.add_row("peak memory", f"{last['memory_bytes'] / 2**30:.1f} GiB")
    for name, left in (("items", "damaged_items"), ("updates", "skipped_updates")):
        if metrics[left]:
            table.add_row(f"{name} skipped", str(len(metrics[left])))
    table.add_row("weights", str(result.run_dir / WEIGHTS_FILE))
    for name, path in own.files.items():
        table.add_row(name, str(path))
    table.add_row("report", str(page))
    if own.next_command:
        table.add_row("next", shlex.join(["vision-ttt", *own.next_command]))
    print_whole(table)


def data_wait(share: float, workers: int) -> str:
    """Return the share of the time that the model waited for data, and what may reduce it."""
    if share <= _LONG_WAIT or workers >= (os.cpu_count() or 1):
        return f"{share:.1%}"
    # A field, because not every command that trains has the flag.
    return f"{share:.1%}; machine.num_workers above {workers} may reduce it"


def _title(metrics: Mapping[str, Any]) -> str:
    return f"{metrics['model']} on {metrics['dataset']}"
