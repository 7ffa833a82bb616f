"""Samples, figures and the one-page report of a diffusion model's training run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.table import Table
from torch import Tensor

from vision_ttt.cli.report_page import write_page
from vision_ttt.cli.wide_table import print_whole
from vision_ttt.diffusion import make_process, sample
from vision_ttt.diffusion.pictures import grid, to_pixels, to_png
from vision_ttt.engine.checkpoint import WEIGHTS_FILE, load_model
from vision_ttt.engine.files import write_bytes
from vision_ttt.engine.train import TrainResult
from vision_ttt.explain.report import Section, png_bytes

_CLASSES, _PER_CLASS, _GUIDANCE = 10, 8, 1.5


def write_diffusion_report(result: TrainResult) -> Path:
    """Write curves.png, samples.png and report.html into the run directory.

    Returns:
        The report's path.
    """
    _, metadata = load_model(result.run_dir / WEIGHTS_FILE, kind="diffusion")
    shown = result.classes[:_CLASSES]
    labels = torch.arange(len(shown), device="cpu").repeat_interleave(_PER_CLASS)
    samples = sample(
        result.model,
        make_process(**metadata.diffusion),
        labels,
        size=tuple(result.input["input_size"][1:]),
        guidance=_GUIDANCE,
        seed=result.metrics["seed"],
    )
    pixels = to_pixels(samples, result.input["mean"], result.input["std"])
    picture = grid(pixels, _PER_CLASS, shown)
    write_bytes(result.run_dir / "samples.png", to_png(picture))
    curves = _loss_curves(result.metrics["epochs"])
    write_bytes(result.run_dir / "curves.png", png_bytes(curves))
    sections = [
        Section("Training", "The objective after each epoch.", curves),
        Section(
            "Samples",
            f"A row for each of {', '.join(shown)}; guidance {_GUIDANCE}, not selected.",
            _shown(picture),
        ),
    ]
    return write_page(result, {"test loss": f"{result.metrics['test_loss']:.4f}"}, sections)


def show_diffusion_summary(result: TrainResult, report: Path) -> None:
    """Print a finished run's figures, and where its weights, samples and report are."""
    metrics = result.metrics
    last = metrics["epochs"][-1]
    weights = result.run_dir / WEIGHTS_FILE
    table = Table(title=f"{metrics['model']} on {metrics['dataset']}", show_header=False)
    table.add_row("train loss", f"{last['train_loss']:.4f}")
    table.add_row("test loss", f"{metrics['test_loss']:.4f}")
    table.add_row("parameters", f"{metrics['parameters']:,}")
    table.add_row("epochs", str(len(metrics["epochs"])))
    table.add_row("training time", f"{metrics['seconds']:.0f} s")
    table.add_row("images per second", f"{last['images_per_second']:.0f}")
    table.add_row("peak memory", f"{last['memory_bytes'] / 2**30:.1f} GiB")
    table.add_row("weights", str(weights))
    table.add_row("samples", str(result.run_dir / "samples.png"))
    table.add_row("report", str(report))
    table.add_row("next", f"vision-ttt sample --checkpoint {weights}")
    print_whole(table)


def _loss_curves(history: Sequence[Mapping[str, Any]]) -> Figure:
    figure = Figure(figsize=(4.2, 3.4), layout="constrained")
    axis = figure.subplots()
    epochs = [row["epoch"] for row in history]
    for key, name in (("train_loss", "training"), ("test_loss", "test")):
        axis.plot(epochs, [row[key] for row in history], label=name)
    axis.set(title="Objective, mean per image", xlabel="epoch", yscale="log")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.3, which="both")
    axis.legend(frameon=False)
    return figure


def _shown(picture: Tensor) -> Figure:
    """A figure of nothing but a picture [3, H, W] uint8, a pixel for a pixel."""
    height, width = picture.shape[1:]
    figure = Figure(figsize=(width / 130, height / 130))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.imshow(picture.permute(1, 2, 0).numpy())
    axis.axis("off")
    return figure
