"""What a run writes beside its checkpoints: CSV, JSON, TensorBoard, and a progress bar."""

import json
import os
import platform
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

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
"""Entries of a row of the history that metrics.csv does not have."""
_NOT_POINTS = {"epoch", "update", "seconds", "memory_bytes", "learning_rate"}
"""Entries of a row of the history that have no curve in TensorBoard."""


def versions() -> dict[str, str]:
    """Return the versions of this package and of what its numbers depend on."""
    names = ("torch", "torchvision", "timm", "accelerate", "numpy", "scikit-learn", "safetensors")
    return {"vision-ttt": __version__, **{name: metadata.version(name) for name in names}}


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
        "device_name": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else device.type.upper(),
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
    ) -> None:
        """Open the logs of a run of `updates`; those of a resumed run go on where `state` is.

        Raises:
            ConfigError: Weights & Biases is asked for and not installed.
        """
        self.folder = folder
        self.config = config
        self.unit = task.unit
        self.updates = updates
        self.device = device
        self.tracker = _open_wandb(folder, config, resumed=state.update > 0)
        self.events = EventFile(folder / "tensorboard", purge_step=state.update + 1)
        self.reduction: float | None = None
        """Of the inner loss along the scan; see `inner_loss_reduction`."""
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
        inner = "" if self.reduction is None else f"  inner loss {-self.reduction:+.0%}"
        self.bar.update(
            self.task,
            completed=state.update,
            description=place_in_run(
                state.epoch + (state.position > 0), state.update, self.config, self.updates
            ),
            figures=f"{rate:.0f} {self.unit}/s  loss {outcome.loss:.3f}{inner}"
            f"  lr {learning_rate:.1e}  {memory / 2**30:.1f} GiB",
        )

    def row(self, row: Mapping[str, Any]) -> None:
        """Log the points of an evaluation.

        Raises:
            OSError: the disk is full.
        """
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

    def metrics(self, history: list[dict[str, Any]], summary: Mapping[str, Any]) -> None:
        """Write metrics.csv and metrics.json anew.

        Raises:
            OSError: the disk is full; names the file, whose former content is kept.
        """
        columns = [name for name in history[-1] if name not in _NOT_COLUMNS]
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


def place_in_run(epoch: float, update: int, config: TrainConfig, updates: int) -> str:
    """Return how far a run has come, in epochs where its length is, else in updates."""
    unit, length = config.optimisation.length
    return f"epoch {epoch:g}/{length}" if unit == "epochs" else f"update {update}/{updates}"


def _open_wandb(folder: Path, config: TrainConfig, *, resumed: bool) -> Any:
    if config.run.wandb_project is None:
        return None
    try:
        import wandb
    except ImportError as error:
        raise ConfigError("wandb_project is set, but the package wandb is not installed") from error
    # A resumed run goes on in its record; every other run has a record of its own.
    kept = folder / "wandb.id"
    if not (resumed and kept.exists()):
        write_text(kept, secrets.token_hex(8))
    return wandb.init(
        project=config.run.wandb_project,
        id=kept.read_text(encoding="utf-8"),
        name=folder.name,
        dir=str(folder),
        config=config.as_dict(),
        resume="allow",
    )
