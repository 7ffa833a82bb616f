"""What a run writes beside its checkpoints: CSV, JSON, TensorBoard, and a progress bar."""

import csv
import io
import json
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from torch.utils.tensorboard import SummaryWriter

from vision_ttt._version import __version__
from vision_ttt.engine.files import write_text

CSV_COLUMNS = (
    "epoch",
    "update",
    "learning_rate",
    "train_loss",
    "test_loss",
    "test_accuracy",
    "inner_loss",
    "images_per_second",
    "seconds",
)


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


class RunLog:
    """The logs of one run, in its directory; a context manager that closes them."""

    def __init__(self, folder: Path, *, first_update: int, show_progress: bool) -> None:
        """Open the logs; those of a resumed run go on after `first_update` updates."""
        self.folder = folder
        self.events = SummaryWriter(str(folder / "tensorboard"), purge_step=first_update)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[figures]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not show_progress,
        )
        self.task = self.bar.add_task("training", figures="")

    def __enter__(self) -> "RunLog":
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.bar.stop()
        try:
            with self._naming_events():
                self.events.close()
        except OSError:
            if kind is None:  # otherwise the error on its way is the one to tell
                raise

    def update(
        self,
        *,
        epoch: int,
        epochs: int,
        update: int,
        updates: int,
        loss: float,
        learning_rate: float,
        gradient_norm: float,
        images_per_second: float,
    ) -> None:
        """Take note of one optimiser update; `update` of `updates` are done."""
        with self._naming_events():
            self.events.add_scalar("train/loss", loss, update)
            self.events.add_scalar("train/learning_rate", learning_rate, update)
            self.events.add_scalar("train/gradient_norm", gradient_norm, update)
        self.bar.update(
            self.task,
            total=updates,
            completed=update,
            description=f"epoch {epoch + 1}/{epochs}",
            figures=f"{images_per_second:.0f} images/s  loss {loss:.3f}  lr {learning_rate:.1e}",
        )

    def epoch(self, history: list[dict[str, Any]], summary: Mapping[str, Any]) -> None:
        """Write metrics.csv and metrics.json anew after a whole epoch, and its TensorBoard points.

        Raises:
            OSError: the disk is full; names the file, whose former content is kept.
        """
        row = history[-1]
        with self._naming_events():
            for name in ("train_loss", "test_loss", "test_accuracy", "images_per_second"):
                self.events.add_scalar(f"epoch/{name}", row[name], row["update"])
            for layer, losses in row["inner_losses"].items():
                mean = sum(losses) / len(losses)
                self.events.add_scalar(f"inner_loss/{layer}", mean, row["update"])
            self.events.flush()
        table = io.StringIO()
        writer = csv.DictWriter(table, CSV_COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(history)
        write_text(self.folder / "metrics.csv", table.getvalue())
        write_text(self.folder / "metrics.json", json.dumps(summary, indent=2) + "\n")

    @contextmanager
    def _naming_events(self) -> Iterator[None]:
        """Let TensorBoard's errors, which name no file, name its folder."""
        try:
            yield
        except OSError as error:
            path = str(self.folder / "tensorboard")
            raise OSError(error.errno, error.strerror or str(error), path) from error
