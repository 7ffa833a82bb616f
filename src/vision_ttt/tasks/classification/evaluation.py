"""Evaluation of a classifier: loss, accuracy, confusion matrix, and every prediction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.utils.data import DataLoader

from vision_ttt.engine.damaged import DamagedItems
from vision_ttt.engine.evaluation import at_least_one, autocast, rows_of_items
from vision_ttt.engine.task import Batch


@dataclass(frozen=True)
class ClassifierEvaluation:
    """What a model says about a dataset of N images in C classes."""

    loss: float
    """Mean cross-entropy in nats."""
    accuracy: float
    """Share of images whose most probable class is theirs, from 0 to 1."""
    top5_accuracy: float
    """Share of images whose class is among the five most probable, from 0 to 1."""
    balanced_accuracy: float
    """Mean over the classes that have images of the share of their images predicted right."""
    roc_auc: float | None
    """Area under the ROC curve of the second class's probability, where there are two classes with
    images; None otherwise."""
    targets: Tensor
    """True class indices [N], in the dataset's order, damaged images left out."""
    predictions: Tensor
    """Most probable class indices [N]."""
    probabilities: Tensor
    """Class probabilities [N, C] float32."""
    confusion: Tensor
    """Counts [C, C]: row = true class, column = predicted class."""

    @property
    def metrics(self) -> dict[str, float]:
        """Loss and accuracy."""
        return {"loss": self.loss, "accuracy": self.accuracy}


def evaluate(
    model: nn.Module,
    loader: DataLoader,
    accelerator: Accelerator,
    *,
    damaged: DamagedItems,
    precision: str = "float32",
    between: Callable[[], None] = lambda: None,
) -> ClassifierEvaluation:
    """Run `model` (in evaluation mode) over `loader`, which holds this process's images.

    Every process gets the evaluation of all images, each of which counts once, in the dataset's
    order. `between` is called before each batch; what it raises ends the evaluation.

    Raises:
        ImageError: an image does not decode and is not to be skipped.
        DatasetError: there is no image.
    """

    def measure(batch: Batch) -> dict[str, Tensor]:
        images = batch["images"]
        with autocast(accelerator.device, precision):
            logits = model(at_least_one(images))[: len(images)]
        return {"logits": logits.float(), "targets": batch["targets"]}

    rows = rows_of_items(measure, model, loader, accelerator, damaged=damaged, between=between)
    return summarise(rows["logits"], rows["targets"])


def summarise(logits: Tensor, targets: Tensor) -> ClassifierEvaluation:
    """Return the evaluation of logits [N, C] against class indices [N]."""
    count, classes = logits.shape
    predictions, probabilities = logits.argmax(dim=1), logits.softmax(dim=1)
    top = logits.topk(min(5, classes), dim=1).indices
    pairs = targets * classes + predictions
    confusion = torch.bincount(pairs, minlength=classes**2).reshape(classes, classes)
    counts = confusion.sum(dim=1)
    has_both = classes == 2 and bool((counts > 0).all())
    return ClassifierEvaluation(
        loss=F.cross_entropy(logits, targets).item(),
        accuracy=(predictions == targets).sum().item() / count,
        top5_accuracy=(top == targets[:, None]).any(dim=1).sum().item() / count,
        balanced_accuracy=(confusion.diagonal() / counts)[counts > 0].mean().item(),
        roc_auc=float(roc_auc_score(targets, probabilities[:, 1])) if has_both else None,
        targets=targets,
        predictions=predictions,
        probabilities=probabilities,
        confusion=confusion,
    )
