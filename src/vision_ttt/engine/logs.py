"""What a run writes beside its checkpoints: CSV, JSON, TensorBoard, and a progress bar."""

import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from vision_ttt._version import __version__
from vision_ttt.engine.config import ConfigError, TrainConfig
from vision_ttt.engine.csv_text import csv_text
from vision_ttt.engine.events import EventFile
from vision_ttt.engine.state import TrainState
from vision_ttt.engine.step import Outcome
from vision_ttt.engine.task import Task
from vision_ttt.files import write_text
from vision_ttt.safe_console import SafeConsole

_NOT_COLUMNS = {"inner_losses", "memory_bytes"}
"""Of a row of the history, left out of metrics.csv."""
_NOT_POINTS = {"epoch", "update", "seconds", "memory_bytes", "learning_rate"}
"""Of a row of the history, no curve of its own at TensorBoard."""


def versions() -> dict[str, str]:
    """Return the versions of this package and of what its numbers depend on."""
    packages = (
        "torch",
        "torchvision",
        "timm",
        "accelerate",
        "numpy",
        "scikit-learn",
        "safetensors",
    )
    return {"vision-ttt": __version__, **{name: metadata.version(name) for name in packages}}


def environment(device: torch.device) -> dict[str, Any]:
    """Return what a reader needs to judge a run's speed and repeat it."""
    return {
        "versions": versions(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
    }


def memory_in_use(device: torch.device) -> int:
    """Return the most bytes in use so far: the GPU's where it is one, else this process's.

    0 where the system does not tell (Windows).
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if os.name != "posix":
        return 0
    import resource  # posix alone has it

    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@contextmanager
def open_log(
    folder: Path,
    config: TrainConfig,
    accelerator: Accelerator,
    state: TrainState,
    task: Task,
    updates: int,
    show_progress: bool,
) -> Iterator["RunLog | SilentLog"]:
    """Open a run's logs; of several processes only the main one writes any.

    Raises:
        ConfigError: Weights & Biases is asked for and not installed.
    """
    if not accelerator.is_main_process:
        yield SilentLog()
        return
    tracker = _open_wandb(folder, config)
    with RunLog(
        folder, config, accelerator.device, state, task, updates, show_progress, tracker
    ) as log:
        yield log


class SilentLog:
    """Stands for the logs in the processes that write none."""

    def inner_loss(self, reduction: float | None) -> None:
        """Do nothing."""

    def update(self, state: TrainState, outcome: Outcome, learning_rate: float) -> None:
        """Do nothing."""

    def row(self, history: list[dict[str, Any]], summary: Mapping[str, Any]) -> None:
        """Do nothing."""


class RunLog:
    """The logs of one run, in its directory; a context manager that closes them."""

    def __init__(
        self,
        folder: Path,
        config: TrainConfig,
        device: torch.device,
        state: TrainState,
        task: Task,
        updates: int,
        show_progress: bool,
        tracker: Any = None,
    ) -> None:
        """Open the logs of a run of `updates`; those of a resumed run go on where `state` is.

        `tracker` is a run of Weights & Biases, None for none.
        """
        self.folder = folder
        self.config = config
        self.unit = task.unit
        self.updates = updates
        self.device = device
        self.tracker = tracker
        self.events = EventFile(folder / "tensorboard", purge_step=state.update)
        self.reduction: float | None = None
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[figures]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=SafeConsole(stderr=True),
            disable=not show_progress,
        )
        self.task = self.bar.add_task("training", total=updates, figures="")

    def __enter__(self) -> "RunLog":
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.bar.stop()
        if self.tracker is not None:
            self.tracker.finish(exit_code=0 if kind is None else 1)
        try:
            with self._naming_events():
                self.events.close()
        except OSError:
            if kind is None:  # otherwise the error that is being raised matters more
                raise

    def inner_loss(self, reduction: float | None) -> None:
        """Keep the inner loss's reduction along the scan; see `inner_loss_reduction`."""
        self.reduction = reduction

    def update(self, state: TrainState, outcome: Outcome, learning_rate: float) -> None:
        """Log the update that `state` counts last."""
        rate = state.units / state.span_seconds
        memory = memory_in_use(self.device)
        self._write(
            {
                "train/loss": outcome.loss,
                "train/learning_rate": learning_rate,
                "train/gradient_norm": outcome.gradient_norm,
                f"speed/{self.unit}_per_second": rate,
                "speed/memory_bytes": memory,
            },
            state.update,
        )
        inner = "" if self.reduction is None else f"  inner loss −{self.reduction:.0%}"
        self.bar.update(
            self.task,
            completed=state.update,
            description=self._place(state),
            figures=f"{rate:.0f} {self.unit}/s  loss {outcome.loss:.3f}{inner}"
            f"  lr {learning_rate:.1e}  {memory / 2**30:.1f} GiB",
        )

    def _place(self, state: TrainState) -> str:
        """The epoch that the last update was of, where epochs are the run's length."""
        unit, length = self.config.optimisation.length
        if unit != "epochs":
            return f"update {state.update}/{self.updates}"
        return f"epoch {state.epoch + (state.position > 0)}/{length}"

    def row(self, history: list[dict[str, Any]], summary: Mapping[str, Any]) -> None:
        """Write metrics.csv and metrics.json anew after an evaluation, and its points elsewhere.

        Raises:
            OSError: the disk is full; names the file, whose former content is kept.
        """
        row = history[-1]
        self.reduction = row["inner_loss_reduction"]
        points = {
            f"evaluation/{name}": value
            for name, value in row.items()
            if name not in _NOT_POINTS and isinstance(value, int | float)
        }
        for layer, losses in row["inner_losses"].items():
            points[f"inner_loss/{layer}"] = sum(losses) / len(losses)
        self._write(points, row["update"])
        with self._naming_events():
            self.events.flush()
        columns = [name for name in row if name not in _NOT_COLUMNS]
        write_text(self.folder / "metrics.csv", csv_text(columns, history))
        write_text(self.folder / "metrics.json", json.dumps(summary, indent=2) + "\n")

    def _write(self, points: Mapping[str, float], update: int) -> None:
        with self._naming_events():
            for name, value in points.items():
                self.events.add_scalar(name, value, update)
        if self.tracker is not None:
            self.tracker.log(dict(points), step=update)

    @contextmanager
    def _naming_events(self) -> Iterator[None]:
        """Let TensorBoard's errors, which name no file, name its folder."""
        try:
            yield
        except OSError as error:
            path = str(self.folder / "tensorboard")
            raise OSError(error.errno, error.strerror or str(error), path) from error


def _open_wandb(folder: Path, config: TrainConfig) -> Any:
    if config.run.wandb_project is None:
        return None
    try:
        import wandb
    except ImportError as error:
        raise ConfigError("wandb_project is set, but the package wandb is not installed") from error
    # A resumed run goes on in the record that its directory's name identifies.
    name = str(folder.resolve()).strip("/").replace("/", "-")
    return wandb.init(
        project=config.run.wandb_project,
        id=name,
        name=folder.name,
        dir=str(folder),
        config=config.as_dict(),
        resume="allow",
    )
