"""Samples and figures of a diffusion model's training run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from vision_ttt.diffusion import sample
from vision_ttt.diffusion.pictures import grid, to_png
from vision_ttt.engine.checkpoint import WEIGHTS_FILE
from vision_ttt.engine.task import Report
from vision_ttt.engine.train import TrainResult
from vision_ttt.explain.report import Section
from vision_ttt.files import write_bytes

if TYPE_CHECKING:
    from vision_ttt.tasks.diffusion.task import Diffusion

_CLASSES, _PER_CLASS, _GUIDANCE = 10, 8, 1.5


def write_report(task: Diffusion, result: TrainResult) -> Report:
    """Write curves.png and samples.png into the run directory; return what the page shows."""
    shown = task.classes[:_CLASSES]
    labels = torch.arange(len(shown), device="cpu").repeat_interleave(_PER_CLASS)
    samples = sample(
        result.model,
        task.process,
        labels,
        size=tuple(task.input["input_size"][1:]),
        guidance=_GUIDANCE,
        seed=result.metrics["seed"],
        clip=task.autoencoder is None,
    )
    picture = grid(task.pixels(samples), _PER_CLASS, shown)
    pictures = result.run_dir / "samples.png"
    write_bytes(pictures, to_png(picture))
    history = result.metrics["history"]
    curves = _loss_curves(history)
    training = Section("Training", "The objective after each epoch.", curves)
    write_bytes(result.run_dir / "curves.png", training.png)
    sections = [
        training,
        Section(
            "Samples",
            f"A row for each of {', '.join(shown)}; guidance {_GUIDANCE}, not selected.",
            _shown(picture),
        ),
    ]
    measured = {
        "train loss": f"{history[-1]['train_loss']:.4f}",
        "test loss": f"{result.metrics['test_loss']:.4f}",
    }
    next_command = f"vision-ttt sample --checkpoint {result.run_dir / WEIGHTS_FILE}"
    return Report(sections, measured, {"samples": pictures}, next_command)


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
