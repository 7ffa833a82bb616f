"""Figures of a classifier's training run, written into its directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from vision_ttt.data import ImageError
from vision_ttt.engine.checkpoint import WEIGHTS_FILE
from vision_ttt.engine.task import Report
from vision_ttt.engine.train import TrainResult
from vision_ttt.explain import gradient_layers, gradient_magnitude, mean_map
from vision_ttt.explain.feature_maps import token_step
from vision_ttt.explain.figures import confusion_matrix, inner_loss_curves
from vision_ttt.explain.map_figures import gradient_map_sheet
from vision_ttt.explain.report import Section
from vision_ttt.tasks.figures import Curves, learning_curves, save, section
from vision_ttt.tasks.images.models import denormalise

if TYPE_CHECKING:
    from vision_ttt.tasks.classification.task import Classification

SHEET_IMAGES = 20
"""Test images on the sheet of gradient maps."""


def write_report(task: Classification, result: TrainResult) -> Report:
    """Write curves.png, confusion.png, inner_loss.png and gradient_maps.png; return the page's.

    A model without inner losses or gradient maps gets the other figures.
    """
    history, evaluation = result.metrics["history"], result.evaluation
    sections = {
        "curves": section(
            "Training", _reading(history), learning_curves, history, panels_of(history)
        ),
        "confusion": section(
            "Confusion matrix",
            "Counts of test images: the true class by row, the predicted one by column.",
            confusion_matrix,
            *(evaluation.confusion, task.classes),
        ),
    }
    if history[-1]["inner_losses"]:
        sections["inner_loss"] = section(
            "What the inner learners lose along the image",
            "Mean inner loss of each layer on successive mini-batches of tokens, before learning "
            "from them; both scan directions, each in its own order.",
            inner_loss_curves,
            history,
        )
    alike = not task.sequences and not isinstance(task.test_set, IterableDataset)
    if alike and gradient_layers(result.model):
        *maps, patch = _gradient_maps(task, result)
        sections["gradient_maps"] = Section(
            "Gradient magnitude maps",
            "Test images (true → predicted), how much the inner learners of the middle block "
            "would learn from each token before they have seen any (norm of the gradient at the "
            "initial state), and the 30 % of tokens where that is most.",
            gradient_map_sheet(*maps, patch=patch),
            gradient_map_sheet(*maps, per_row=4, patch=patch),
        )
    metrics = result.metrics
    measured = {
        "test accuracy": f"{metrics['test_accuracy']:.2%}",
        "best test accuracy": f"{metrics['best_test_accuracy']:.2%}",
        "test loss": f"{metrics['test_loss']:.4f} nats per image",
    }
    last = history[-1]
    if last["inner_loss_reduction"] is not None:
        measured["inner loss, last against first"] = f"{-last['inner_loss_reduction']:+.0%}"
    next_command = ("predict", "IMAGES", "--checkpoint", str(result.run_dir / WEIGHTS_FILE))
    return Report(save(sections, result.run_dir), measured, {}, next_command)


def panels_of(history: Sequence[Mapping[str, Any]]) -> list[Curves]:
    """Return the panels of the curves; models without TTT layers have no inner loss."""
    losses = {"train_loss": "training", "test_loss": "test"}
    accuracy = history[-1]["test_accuracy"]
    panels = [
        Curves("Cross-entropy", "nats per image", losses),
        Curves(f"Test accuracy: {accuracy:.1%}", "% of test images", {"test_accuracy": ""}, 100),
    ]
    if any(row["inner_loss"] is not None for row in history):
        inner = {"inner_loss": ""}
        panels.append(Curves("Inner loss, mean over layers", "½‖f(k) − v‖² per token", inner))
    return panels


def _reading(history: Sequence[Mapping[str, Any]]) -> str:
    """How to read the curves: above all, why the inner loss may rise."""
    if all(row["inner_loss"] is None for row in history):
        return "Loss and accuracy at each evaluation."
    text = (
        "Loss, accuracy and inner loss at each evaluation. Training does not minimise the inner "
        "loss: it is a distance to targets that the model makes itself, and it rises where "
        "training makes these larger. That the learners learn shows in its fall along the image, "
        "from the first mini-batch of tokens to the last"
    )
    falls = [row["inner_loss_reduction"] for row in history]
    if None in (falls[0], falls[-1]):
        return text + "."
    return text + f": by {falls[0]:.0%} at the first evaluation, by {falls[-1]:.0%} at the last."


def _gradient_maps(
    task: Classification, result: TrainResult
) -> tuple[Tensor, Tensor, list[str], tuple[int, int] | None]:
    """Images in [0, 1], their maps, their titles, and the pixels from token to token."""
    evaluation = result.evaluation
    chosen = _spread(evaluation.targets, SHEET_IMAGES)
    places = _decodable(task, len(evaluation.targets))
    images = torch.stack([task.test_set[places[index]][0] for index in chosen])
    device = next(result.model.parameters()).device
    middle = len(gradient_layers(result.model)) // 2
    maps = mean_map(
        gradient_magnitude(result.model, images.to(device), state="initial", layers=[middle])
    )
    names = task.classes
    titles = [
        f"{names[evaluation.targets[i]]} → {names[evaluation.predictions[i]]}" for i in chosen
    ]
    patch = token_step(result.model, images, tuple(maps.shape[1:]))
    return denormalise(images, task.input), maps, titles, patch


def _decodable(task: Classification, count: int) -> Sequence[int]:
    """Where in the test set the evaluation's `count` rows are: it leaves damaged images out."""
    every = range(len(task.test_set))
    if len(every) == count:
        return every
    return [index for index in every if not isinstance(task.test_set[index], ImageError)]


def _spread(targets: Tensor, count: int) -> list[int]:
    """Indices of up to ``count`` images, the classes taking turns."""
    by_class = [torch.nonzero(targets == label).flatten().tolist() for label in targets.unique()]
    turns = [group[i] for i in range(count) for group in by_class if i < len(group)]
    return turns[:count]
