"""One run of a sweep, in a process of its own."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from studies.sweeps.results import HISTORY, Result, finished, save_result
from vision_ttt.bench.complexity import macs_of_pass
from vision_ttt.bench.machine import describe_run
from vision_ttt.engine import TrainConfig, train
from vision_ttt.engine.locks import alone_in
from vision_ttt.engine.train import TrainResult
from vision_ttt.errors import Interrupted, UserError

_LOGGER = logging.getLogger(__name__)
INTERRUPTED = 130  # exit codes, as the command line has them
USER_ERROR = 2


@dataclass(frozen=True)
class Task:
    """What one process is to train."""

    sweep: str
    row: str
    config: TrainConfig
    command: tuple[str, ...]
    """Of the sweep, for the record."""
    examine: Callable[[TrainResult], Mapping[str, Any]] | None = None
    """The sweep's own."""
    accuracy: str | None = "test_accuracy"
    """The sweep's own; None for a row without."""


def perform(task: Task) -> Result:
    """Train, or go on with what an interrupted process left, and keep the result.

    Waits for a process that a killed sweep left behind at this very run.

    Raises:
        Interrupted, UserError, OSError: as :func:`vision_ttt.engine.train` does.
    """
    config = task.config
    with alone_in(Path(config.run.output), wait=True):
        result = finished(config)
        if result is None:
            result = _train(task)
            save_result(config, result)
    return result


def _train(task: Task) -> Result:
    config = task.config
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run = describe_run(task.command, device)  # of the source as it is when the run begins
    trained = train(config, resume="auto")
    history = [
        {**row, "test_accuracy": math.nan if task.accuracy is None else row[task.accuracy]}
        for row in trained.metrics["history"]
    ]
    last = history[-1]
    place = next(trained.model.parameters()).device
    return Result(
        sweep=task.sweep,
        row=task.row,
        seed=config.run.seed,
        model=config.model.name,
        model_args=json.dumps(config.model.arguments),
        epochs=last["epoch"],
        train_images=trained.metrics[f"train_{trained.task.unit}"],
        test_images=trained.metrics[f"test_{trained.task.unit}"],
        parameters=trained.metrics["parameters"],
        macs=macs_of_pass(trained.model, trained.task.example().to(place)),
        test_accuracy=last["test_accuracy"],
        test_loss=last["test_loss"],
        train_loss=last["train_loss"],
        seconds=trained.metrics["seconds"],
        run=run,
        history=json.dumps(_columns(history)),
        measures=json.dumps({} if task.examine is None else task.examine(trained)),
    )


def _columns(history: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """The rows of metrics.json as a list for each of HISTORY, to five significant digits."""
    columns = {name: [row[name] for row in history] for name in HISTORY}
    columns["seconds"] = list(accumulate(columns["seconds"]))  # a row has those since the last
    return {
        name: [value if isinstance(value, int) else float(f"{value:.5g}") for value in values]
        for name, values in columns.items()
    }


def main(task: Task, lifeline: Connection, log: Path) -> None:
    """Perform a task as all that this process does, and exit.

    Args:
        task: what to train.
        lifeline: the reading end of a pipe that the sweep holds open. When the sweep ends, in
            whatever way, the run writes a checkpoint and exits.
        log: file that what the run says is added to.
    """
    with log.open("ab") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    try:
        perform(task)
    except Interrupted as interruption:
        _LOGGER.info("%s", interruption)
        sys.exit(INTERRUPTED)
    except UserError as error:
        _LOGGER.error("error: %s", error)
        sys.exit(USER_ERROR)


def _end_with(lifeline: Connection) -> None:
    """Send this process SIGTERM when the sweep, which holds the pipe's other end, has ended."""
    lifeline.poll(None)
    os.kill(os.getpid(), signal.SIGTERM)
