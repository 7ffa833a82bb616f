"""Samples and figures of a diffusion model's training run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vision_ttt.diffusion import sample
from vision_ttt.engine.checkpoint import WEIGHTS_FILE
from vision_ttt.engine.task import Report
from vision_ttt.engine.train import TrainResult
from vision_ttt.explain.report import Picture, Section
from vision_ttt.tasks.diffusion.pictures import grid, to_png
from vision_ttt.tasks.figures import Curves, learning_curves, save

if TYPE_CHECKING:
    from vision_ttt.tasks.diffusion.task import Diffusion

_CLASSES, _PER_CLASS, _GUIDANCE = 10, 8, 1.5


def write_report(task: Diffusion, result: TrainResult) -> Report:
    """Write curves.png and samples.png into the run directory; return what the page shows."""
    shown = task.classes[:_CLASSES]
    labels = torch.arange(len(shown), device="cpu").repeat_interleave(_PER_CLASS)
    # Without dropped labels in training, the model has no answer for no class.
    guidance = _GUIDANCE if result.model.label_embed.dropout else 1.0
    samples = sample(
        result.model,
        task.process,
        labels,
        size=tuple(task.input["input_size"][1:]),
        guidance=guidance,
        seed=result.metrics["seed"],
        clip=task.autoencoder is None,
    )
    pixels = task.pixels(samples)
    history = result.metrics["history"]
    lines = {"train_loss": "training", "test_loss": "test"}
    curves = learning_curves(history, [Curves("Objective", "mean per image", lines)])
    curves.axes[0].set_yscale("log")
    sections = {
        "curves": Section("Training", "The objective at each evaluation.", curves),
        "samples": Picture(
            "Samples",
            f"A row for each of {', '.join(shown)}; guidance {guidance:g}, not selected.",
            to_png(grid(pixels, _PER_CLASS, shown)),
        ),
    }
    loss = history[-1]["train_loss"]  # None where every update was skipped
    measured = {
        "train loss": "-" if loss is None else f"{loss:.4f}",
        "test loss": f"{result.metrics['test_loss']:.4f}",
    }
    next_command = ("sample", "--checkpoint", str(result.run_dir / WEIGHTS_FILE))
    pictures = {"samples": result.run_dir / "samples.png"}
    return Report(save(sections, result.run_dir), measured, pictures, next_command)
