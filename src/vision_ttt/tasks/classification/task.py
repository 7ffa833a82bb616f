"""Training a classifier: mixed images, cross-entropy, self-distillation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from rich.table import Table
from sklearn.metrics import roc_auc_score
from timm.data import Mixup
from torch import Tensor, nn
from torch.utils.data import DataLoader

from vision_ttt.engine.config import TrainConfig
from vision_ttt.engine.damaged import DamagedItems
from vision_ttt.engine.evaluation import at_least_one, autocast, rows_of_items
from vision_ttt.engine.task import Batch, Metric, Moment, Report
from vision_ttt.engine.train import TrainResult
from vision_ttt.tasks.images.task import ImageTask


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
    images and all logits are finite; None otherwise."""
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


def summarise(logits: Tensor, targets: Tensor) -> ClassifierEvaluation:
    """Return the evaluation of logits [N, C] against class indices [N]."""
    count, classes = logits.shape
    predictions, probabilities = logits.argmax(dim=1), logits.softmax(dim=1)
    top = logits.topk(min(5, classes), dim=1).indices
    pairs = targets * classes + predictions
    confusion = torch.bincount(pairs, minlength=classes**2).reshape(classes, classes)
    counts = confusion.sum(dim=1)
    # Logits that are not finite have no order.
    ranks = classes == 2 and bool((counts > 0).all()) and bool(logits.isfinite().all())
    return ClassifierEvaluation(
        loss=F.cross_entropy(logits, targets).item(),
        accuracy=(predictions == targets).sum().item() / count,
        top5_accuracy=(top == targets[:, None]).any(dim=1).sum().item() / count,
        balanced_accuracy=(confusion.diagonal() / counts)[counts > 0].mean().item(),
        # By the logits: probabilities round to 1, and images of equal ones have no order.
        roc_auc=float(roc_auc_score(targets, logits[:, 1] - logits[:, 0])) if ranks else None,
        targets=targets,
        predictions=predictions,
        probabilities=probabilities,
        confusion=confusion,
    )


class Classification(ImageTask):
    """Cross-entropy of class logits."""

    primary = Metric("accuracy", higher_is_better=True, form=".2%")

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        own = config.task
        self.precision = config.machine.precision
        self.mix = None
        if own.mixes_images:
            self.mix = Mixup(
                mixup_alpha=own.mixup,
                cutmix_alpha=own.cutmix,
                label_smoothing=own.label_smoothing,
                num_classes=len(self.classes),
            )
        # Mixing smooths its labels itself.
        self.smoothing = 0.0 if own.mixes_images else own.label_smoothing
        self.distillation = own.self_distillation
        self.distillation_start = own.self_distillation_start

    def augment(self, batch: Batch) -> Batch:
        """Return the batch with its images mixed in pairs, where mixup or CutMix is on."""
        if self.mix is None:
            return batch
        even = len(batch["images"]) // 2 * 2  # a damaged image may have left an odd number
        kept = {name: batch[name][:even] for name in ("images", "targets", "indices")}
        if even:
            kept["images"], kept["targets"] = self.mix(kept["images"], kept["targets"])
        return {**batch, **kept}

    def loss(self, forward: nn.Module, batch: Batch, moment: Moment) -> tuple[Tensor, int]:
        """Return the summed cross-entropy in nats, and the number of images.

        Targets are class indices [B], or probabilities [B, C] after mixing. With self-distillation
        the cross-entropy against the moving average's probabilities is added, weighted (MESA).
        """
        images, targets = batch["images"], batch["targets"]
        count = len(targets)
        seen = images if self.sequences else at_least_one(images)
        with autocast(targets.device, self.precision):
            logits = forward(seen)[:count].float()
        distils = self.distillation > 0 and moment.done >= self.distillation_start
        if distils:
            with torch.no_grad(), autocast(targets.device, self.precision):
                soft = moment.average(seen)[:count].float().softmax(dim=1)
        if not count:
            return logits.sum(), 0
        loss = F.cross_entropy(logits, targets, label_smoothing=self.smoothing, reduction="sum")
        if distils:
            loss = loss + self.distillation * F.cross_entropy(logits, soft, reduction="sum")
        return loss, count

    def evaluate(
        self,
        model: nn.Module,
        loader: DataLoader,
        accelerator: Accelerator,
        *,
        damaged: DamagedItems,
        between: Callable[[], None],
    ) -> ClassifierEvaluation:
        """Return loss, accuracy and every prediction."""

        def measure(batch: Batch) -> dict[str, Tensor]:
            images, targets = batch["images"], batch["targets"]
            with autocast(targets.device, self.precision):
                logits = model(images if self.sequences else at_least_one(images))
            return {"logits": logits[: len(targets)].float(), "targets": targets}

        rows = rows_of_items(measure, model, loader, accelerator, damaged=damaged, between=between)
        return summarise(rows["logits"], rows["targets"])

    def figures(self, evaluation: ClassifierEvaluation) -> dict[str, Any]:
        """Return loss and accuracies, over all and by class."""
        counts = evaluation.confusion.sum(dim=1).tolist()
        correct = evaluation.confusion.diagonal().tolist()
        return {
            "images": len(evaluation.targets),
            "loss": evaluation.loss,
            "accuracy": evaluation.accuracy,
            "top5_accuracy": evaluation.top5_accuracy,
            "balanced_accuracy": evaluation.balanced_accuracy,
            "roc_auc": evaluation.roc_auc,
            "classes": [
                {"class": name, "images": count, "accuracy": right / count if count else None}
                for name, count, right in zip(self.classes, counts, correct, strict=True)
            ],
        }

    def table(self, title: str, figures: Mapping[str, Any]) -> Table:
        """Return the accuracy of each class and of all, and the loss.

        Top-5 accuracy is left out for five classes or fewer, where it is always 100 %.
        """
        table = Table("class", title=title)
        table.add_column("images", justify="right")
        table.add_column("accuracy", justify="right")
        for row in figures["classes"]:
            accuracy = "-" if row["accuracy"] is None else f"{row['accuracy']:.2%}"
            table.add_row(row["class"], str(row["images"]), accuracy)
        table.add_section()
        table.add_row("all", str(figures["images"]), f"{figures['accuracy']:.2%}")
        if len(figures["classes"]) > 5:
            table.add_row("top-5", "", f"{figures['top5_accuracy']:.2%}")
        table.add_row("balanced", "", f"{figures['balanced_accuracy']:.2%}")
        if figures["roc_auc"] is not None:
            table.add_row("ROC-AUC", "", f"{figures['roc_auc']:.4f}")
        table.add_row("loss", "", f"{figures['loss']:.4f}")
        return table

    def report(self, result: TrainResult) -> Report:
        """Write the figures of the training, the predictions and the inner loop."""
        from vision_ttt.tasks.classification.report import write_report

        return write_report(self, result)
