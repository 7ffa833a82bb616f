"""Run the tasks of a sweep side by side, each in a process of its own, and survive their faults."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from studies.sweeps import one_run
from studies.sweeps.one_run import Task
from studies.sweeps.results import Result, finished
from vision_ttt.engine.locks import alone_in
from vision_ttt.errors import UserError

LOG_FILE = "log.txt"
"""In a run's directory: what its process said, all attempts one after the other."""
_LAST_LINES = 5


@dataclass(frozen=True)
class Failure:
    """A run that ended without a result."""

    task: Task
    exit_code: int
    """Of its process; negative for the signal that killed it."""
    last_lines: tuple[str, ...]
    """The end of its log."""
    log: Path


Outcome = Result | Failure


def run_all(
    tasks: Sequence[Task], folder: Path, jobs: int, on_end: Callable[[Task, Outcome], None]
) -> list[Failure]:
    """Train every task that is not finished yet, `jobs` at a time, and return those that failed.

    A failed run stops no other. If this process ends, however it does, its runs write a checkpoint
    and end, too; the next call goes on from there.

    Args:
        tasks: what to train; outputs lie under `folder`.
        folder: made where missing; held by one sweep at a time.
        jobs: processes at a time, one thread each.
        on_end: called with each task and what came of it, in the order of their ends; those that
            were finished before come first.

    Raises:
        UserError: another sweep is at work in the folder.
        OSError: the folder cannot be made or written.
    """
    try:
        with alone_in(folder, wait=False):
            return _run_all(tasks, jobs, on_end)
    except BlockingIOError:
        raise UserError(
            f"another sweep is at work in {folder}; wait for it, or choose another output"
        ) from None


def _run_all(
    tasks: Sequence[Task], jobs: int, on_end: Callable[[Task, Outcome], None]
) -> list[Failure]:
    failures: list[Failure] = []
    waiting: deque[Task] = deque()
    for task in tasks:
        result = finished(task.config)
        if result is None:
            waiting.append(task)
        else:
            on_end(task, result)
    with _Processes() as processes:
        while waiting or processes.running:
            while waiting and len(processes.running) < jobs:
                processes.start(waiting.popleft())
            for task, exit_code in processes.wait():
                outcome = _outcome(task, exit_code)
                if isinstance(outcome, Failure):
                    failures.append(outcome)
                on_end(task, outcome)
    return failures


class _Processes:
    """The processes at work; leaving the context asks them to end and waits until they have."""

    def __init__(self) -> None:
        self.running: list[tuple[Task, BaseProcess, connection.Connection]] = []
        # A server that has imported everything forks them: importing takes as long as an epoch.
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload([one_run.__name__])

    def __enter__(self) -> _Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for _task, _process, lifeline in self.running:
            lifeline.close()
        for _task, process, _lifeline in self.running:
            process.join()

    def start(self, task: Task) -> None:
        run_dir = Path(task.config.run.output)
        run_dir.mkdir(parents=True, exist_ok=True)
        there, here = self.context.Pipe(duplex=False)
        process = self.context.Process(target=one_run.main, args=(task, there, run_dir / LOG_FILE))
        process.start()
        there.close()
        self.running.append((task, process, here))

    def wait(self) -> list[tuple[Task, int]]:
        """The tasks whose processes have ended, at least one, with their exit codes."""
        connection.wait([process.sentinel for _task, process, _lifeline in self.running])
        ended, running = [], []
        for entry in self.running:
            task, process, lifeline = entry
            if process.exitcode is None:
                running.append(entry)
            else:
                lifeline.close()
                ended.append((task, process.exitcode))
        self.running = running
        return ended


def _outcome(task: Task, exit_code: int) -> Outcome:
    result = finished(task.config)
    if exit_code == 0 and result is not None:
        return result
    log = Path(task.config.run.output) / LOG_FILE
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    told = [line for line in lines if line.strip()]
    return Failure(task, exit_code, tuple(told[-_LAST_LINES:]), log)
