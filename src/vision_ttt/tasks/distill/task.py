"""Training a student to compute what a teacher computes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from vision_ttt.engine.checkpoint import WEIGHTS_FILE
from vision_ttt.engine.config import TrainConfig
from vision_ttt.engine.damaged import DamagedItems
from vision_ttt.engine.evaluation import at_least_one, autocast, rows_of_items
from vision_ttt.engine.initial_weights import start_from
from vision_ttt.engine.task import Batch, Metric, Moment, Report
from vision_ttt.engine.train import TrainResult
from vision_ttt.tasks.distill.model import FeatureStudent, build_student, distances
from vision_ttt.tasks.distill.teacher import Teacher
from vision_ttt.tasks.figures import Curves, learning_curves, save, section
from vision_ttt.tasks.images.pretraining import start_backbone
from vision_ttt.tasks.images.task import ImageTask

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class DistillEvaluation:
    """How close a student is to its teacher on test images."""

    metrics: Mapping[str, float]
    """`loss`, the mean over the images; of logits `accuracy`, the share of images whose class is
    the student's most probable one, and `agreement`, the share where it is the teacher's."""


class Distill(ImageTask):
    """The distance of a student's features from a teacher's, or of its class probabilities."""

    primary = Metric("loss", higher_is_better=False)

    def __init__(self, config: TrainConfig) -> None:
        """Open the images and load the teacher.

        Raises:
            UserError: as :class:`ImageTask` and :class:`Teacher`.
        """
        super().__init__(config)
        self.own = config.task
        base = str(config.model.arguments.get("base", self.own.teacher))
        if base.partition(".")[0] != self.own.teacher.partition(".")[0]:
            _LOGGER.warning(
                "the teacher is %s, but the student is made from %s", self.own.teacher, base
            )
        self.teacher = Teacher(config.task, len(self.classes))

    def build_model(self, name: str, arguments: Mapping[str, Any]) -> nn.Module:
        """Build the student."""
        widths = self.teacher.widths
        return build_student(name, arguments, match=self.own.match, widths=widths)

    def start_from(
        self, path: Path, model: nn.Module, name: str, model_args: Mapping[str, Any]
    ) -> str:
        """Start the student's backbone and head from weights of any task."""
        start = start_backbone if isinstance(model, FeatureStudent) else start_from
        return start(path, model, name, model_args)

    def carried(self) -> dict[str, Any]:
        """Return what is carried of the images, and the widths of the teacher's features."""
        return {**super().carried(), "widths": self.teacher.widths}

    def loss(self, forward: nn.Module, batch: Batch, moment: Moment) -> tuple[Tensor, int]:
        """Return the images' summed losses, and the number of images."""
        losses, _, _ = self.compared(forward, batch)
        return losses.sum(), len(losses)

    def compared(
        self, forward: nn.Module, batch: Batch
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """The loss of each image [B], and what student and teacher compute of them."""
        images, own = batch["images"], self.own
        seen, count = at_least_one(images), len(images)
        with autocast(images.device, self.config.machine.precision):
            wanted = [each[:count] for each in self.teacher(seen, self.input)]
            found = forward(seen)
        found = [each[:count] for each in ([found] if own.match == "logits" else found)]
        if own.match == "logits":
            losses = self._of_logits(found[0].float(), wanted[0].float(), batch["targets"])
        else:
            pairs = zip(found, wanted, strict=True)
            losses = sum(distances(*pair, own.feature_loss) for pair in pairs) / len(found)
        return losses, found, wanted

    def _of_logits(self, found: Tensor, wanted: Tensor, targets: Tensor) -> Tensor:
        """Relative entropy of the teacher's probabilities, and the share of the labels'."""
        heat, share = self.own.temperature, self.own.label_weight
        own, others = ((each / heat).log_softmax(-1) for each in (found, wanted))
        losses = heat**2 * F.kl_div(own, others, reduction="none", log_target=True).sum(-1)
        if share:
            labels = F.cross_entropy(found, targets, reduction="none")
            losses = (1 - share) * losses + share * labels
        return losses

    def evaluate(
        self,
        model: nn.Module,
        loader: DataLoader,
        accelerator: Accelerator,
        *,
        damaged: DamagedItems,
        between: Callable[[], None],
    ) -> DistillEvaluation:
        """Return the loss, and of logits how often the student's class is the right one."""

        def measure(batch: Batch) -> dict[str, Tensor]:
            losses, found, wanted = self.compared(model, batch)
            if self.own.match != "logits":
                return {"loss": losses}
            classes, teachers = found[0].argmax(-1), wanted[0].argmax(-1)
            right = {"accuracy": batch["targets"], "agreement": teachers}
            return {"loss": losses, **{key: classes == value for key, value in right.items()}}

        rows = rows_of_items(measure, model, loader, accelerator, damaged=damaged, between=between)
        means = {name: values.double().mean().item() for name, values in rows.items()}
        return DistillEvaluation(means)

    def report(self, result: TrainResult) -> Report:
        """Write the curves."""
        history, metrics = result.metrics["history"], result.evaluation.metrics
        lines = {"train_loss": "training", "test_loss": "test"}
        panels = [Curves("Distance from the teacher", "mean per image", lines)]
        if "accuracy" in metrics:
            lines = {"test_accuracy": "labels", "test_agreement": "teacher"}
            panels.append(Curves("Same class on test images", "%", lines, scale=100.0))
        caption = f"Teacher {self.own.teacher}, match {self.own.match}."
        sections = {
            "curves": section("Training", caption, learning_curves, *(history, panels)),
        }
        measured = {
            f"test {name}": f"{value:.4f}" if name == "loss" else f"{value:.2%}"
            for name, value in metrics.items()
        }
        weights = result.run_dir / WEIGHTS_FILE
        next_command = ("train", "RECIPE", "--initial-weights", str(weights))
        return Report(save(sections, result.run_dir), measured, {}, next_command)
