"""Figures and the one-page report of a training run, written into its directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from vision_ttt.cli.report_page import write_page
from vision_ttt.cli.wide_table import print_whole
from vision_ttt.data.loading import BadImage
from vision_ttt.engine.checkpoint import WEIGHTS_FILE
from vision_ttt.engine.files import write_bytes
from vision_ttt.engine.train import TrainResult
from vision_ttt.explain import gradient_magnitude_maps
from vision_ttt.explain.figures import (
    confusion_matrix,
    inner_loss_curves,
    training_curves,
)
from vision_ttt.explain.map_figures import gradient_map_sheet
from vision_ttt.explain.report import Section, png_bytes
from vision_ttt.layers import TTTLinear
from vision_ttt.models import Vittt

SHEET_IMAGES = 20


def write_run_report(result: TrainResult) -> Path:
    """Write curves.png, confusion.png, inner_loss.png, gradient_maps.png and report.html.

    The figures of the inner loop are of a Vittt of linear inner models only; others get the rest.

    Returns:
        The report's path, in the run directory.
    """
    history, evaluation = result.metrics["epochs"], result.evaluation
    sections = {
        "curves": Section(
            "Training",
            _reading(history),
            training_curves(history),
            training_curves(history, narrow=True),
        ),
        "confusion": Section(
            "Confusion matrix",
            "Counts of test images: the true class by row, the predicted one by column.",
            confusion_matrix(evaluation.confusion, result.classes),
            confusion_matrix(evaluation.confusion, result.classes, narrow=True),
        ),
    }
    inner = inner_loss_curves(history)
    if inner is not None:
        sections["inner_loss"] = Section(
            "What the inner learners lose along the image",
            "Mean inner loss of each layer on successive mini-batches of tokens, before learning "
            "from them; both scan directions, each in its own order.",
            inner,
            inner_loss_curves(history, narrow=True),
        )
    if _has_maps(result.model) and not isinstance(result.test_images, IterableDataset):
        maps = _gradient_maps(result)
        sections["gradient_maps"] = Section(
            "Gradient magnitude maps",
            "Test images (true → predicted), how much the inner learners of the middle block "
            "would learn from each token before they have seen any (norm of the gradient at the "
            "initial state), and the 30 % of tokens where that is most.",
            gradient_map_sheet(*maps),
            gradient_map_sheet(*maps, per_row=4),
        )
    for name, section in sections.items():
        write_bytes(result.run_dir / f"{name}.png", png_bytes(section.figure))
    measured = {
        "test accuracy": f"{result.metrics['test_accuracy']:.2%}",
        "test loss": f"{result.metrics['test_loss']:.4f} nats per image",
    }
    return write_page(result, measured, list(sections.values()))


def show_summary(result: TrainResult, report: Path, title: str | None = None) -> None:
    """Print a finished run's figures, and where its weights and its report are."""
    metrics = result.metrics
    last = metrics["epochs"][-1]
    table = Table(title=title or f"{metrics['model']} on {metrics['dataset']}", show_header=False)
    table.add_row("test accuracy", f"{metrics['test_accuracy']:.2%}")
    table.add_row("best test accuracy", f"{metrics['best_test_accuracy']:.2%}")
    table.add_row("test loss", f"{metrics['test_loss']:.4f}")
    if last["inner_loss_reduction"] is not None:
        table.add_row("inner loss, last against first", f"−{last['inner_loss_reduction']:.0%}")
    table.add_row("parameters", f"{metrics['parameters']:,}")
    table.add_row("epochs", str(len(metrics["epochs"])))
    table.add_row("training time", f"{metrics['seconds']:.0f} s")
    table.add_row("images per second", f"{last['images_per_second']:.0f}")
    table.add_row("of it waiting for images", f"{last['data_share']:.1%}")
    table.add_row("peak memory", f"{last['memory_bytes'] / 2**30:.1f} GiB")
    for name, left in (("images", "bad_images"), ("updates", "skipped_updates")):
        if metrics[left]:
            table.add_row(f"{name} skipped", str(len(metrics[left])))
    table.add_row("weights", str(result.run_dir / WEIGHTS_FILE))
    table.add_row("report", str(report))
    print_whole(table)


def _has_maps(model: nn.Module) -> bool:
    return isinstance(model, Vittt) and isinstance(model.blocks[0].mixer.ttt, TTTLinear)


def _reading(history: Sequence[Mapping[str, Any]]) -> str:
    """How to read the curves: above all, why the inner loss may rise."""
    if all(row["inner_loss"] is None for row in history):
        return "Loss and accuracy after each epoch."
    text = (
        "Loss, accuracy and inner loss after each epoch. Training does not minimise the inner "
        "loss: it is a distance to targets that the model makes itself, and it rises where "
        "training makes these larger. That the learners learn shows in its fall along the image, "
        "from the first mini-batch of tokens to the last"
    )
    falls = [row["inner_loss_reduction"] for row in history]
    if None in (falls[0], falls[-1]):
        return text + "."
    return text + f": by {falls[0]:.0%} after the first epoch, by {falls[-1]:.0%} after the last."


def _gradient_maps(result: TrainResult) -> tuple[Tensor, Tensor, list[str]]:
    """Images in [0, 1], their maps and their titles."""
    evaluation = result.evaluation
    chosen = _spread(evaluation.targets, SHEET_IMAGES)
    places = _decodable(result)
    images = torch.stack([result.test_images[places[index]][0] for index in chosen])
    device = next(result.model.parameters()).device
    middle = len(result.model.blocks) // 2
    maps = gradient_magnitude_maps(result.model, images.to(device), middle, state="initial")
    mean, std = (images.new_tensor(result.input[key]).view(-1, 1, 1) for key in ("mean", "std"))
    names = result.classes
    titles = [
        f"{names[evaluation.targets[i]]} → {names[evaluation.predictions[i]]}" for i in chosen
    ]
    return images * std + mean, maps, titles


def _decodable(result: TrainResult) -> Sequence[int]:
    """Where in the test set the evaluation's rows are: it leaves bad images out."""
    every = range(len(result.test_images))
    if len(every) == len(result.evaluation.targets):
        return every
    return [index for index in every if not isinstance(result.test_images[index], BadImage)]


def _spread(targets: Tensor, count: int) -> list[int]:
    """Indices of up to ``count`` images, the classes taking turns."""
    by_class = [torch.nonzero(targets == label).flatten().tolist() for label in targets.unique()]
    turns = [group[i] for i in range(count) for group in by_class if i < len(group)]
    return turns[:count]
