"""Training a backbone to say the same of every crop of an image."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader

from vision_ttt.data import collate, train_transform, with_transform
from vision_ttt.data.loading import without_damaged
from vision_ttt.engine.checkpoint import WEIGHTS_FILE
from vision_ttt.engine.config import ConfigError
from vision_ttt.engine.damaged import DamagedItems
from vision_ttt.engine.evaluation import at_least_one, autocast, rows_of_items
from vision_ttt.engine.task import Batch, Metric, Moment, Report
from vision_ttt.engine.train import TrainResult
from vision_ttt.tasks.dino.model import OUTPUTS, build_dino, crop_losses
from vision_ttt.tasks.images.figures import Curves, learning_curves, save, section
from vision_ttt.tasks.images.models import check_accepts
from vision_ttt.tasks.images.pretraining import start_backbone
from vision_ttt.tasks.images.task import AUGMENTATION, ImageTask

_CHUNK = 4096  # images whose similarities are in memory at once


@dataclass(frozen=True)
class MultiCrop:
    """Makes two large crops [2, 3, H, W] of a picture, and small ones [n, 3, h, w]."""

    large: Callable[[Image.Image], Tensor]
    small: Callable[[Image.Image], Tensor]
    count: int
    """Of small crops."""

    def __call__(self, picture: Image.Image) -> tuple[Tensor, ...]:
        numbers = ((self.large, 2), (self.small, self.count))
        return tuple(
            torch.stack([crop(picture) for _ in range(count)]) for crop, count in numbers if count
        )


@dataclass(frozen=True)
class NeighbourEvaluation:
    """Whether the features of N test images lie by class."""

    neighbour_accuracy: float
    """Share of images whose nearest other test image, by cosine, is of their class."""

    @property
    def metrics(self) -> dict[str, float]:
        """The share."""
        return {"neighbour_accuracy": self.neighbour_accuracy}


class Dino(ImageTask):
    """Cross-entropy between a teacher's and a student's outputs of different crops (DINO)."""

    primary = Metric("neighbour_accuracy", higher_is_better=True, form=".2%")
    student: nn.Module
    """The model that is trained, from `prepare` on, which keeps the center."""

    def model_arguments(self) -> dict[str, Any]:
        """Return a classifier's arguments, and the number of outputs."""
        return {**super().model_arguments(), OUTPUTS: self.config.task.outputs}

    def build_model(self, name: str, arguments: Mapping[str, Any]) -> nn.Module:
        """Build the backbone with its projection."""
        return build_dino(name, arguments)

    def start_from(
        self, path: Path, model: nn.Module, name: str, model_args: Mapping[str, Any]
    ) -> str:
        """Start the backbone from weights of any task; the projection stays as it is."""
        return start_backbone(path, model, name, model_args)

    def check_model(self, model: nn.Module) -> None:
        """Raise ConfigError unless there is a teacher."""
        if not self.config.optimisation.ema_decay:
            raise ConfigError(
                "ema_decay is 0; it must be above 0, as the weights' moving average is the teacher"
            )

    def prepare(self, model: nn.Module) -> None:
        """Set the images, and the crops of training.

        Raises:
            ConfigError: there is no moving average, or the model does not accept the images or the
                small crops.
        """
        super().prepare(model)
        self.student = model
        data, own = self.config.data, self.config.task
        augmentation = {name: getattr(data, name) for name in AUGMENTATION}
        large = train_transform(self.input, **augmentation)
        patch = max(model.backbone.patch_embed.patch_size)
        side = own.local_size or max(1, self.input["input_size"][1] // (2 * patch)) * patch
        small = {**self.input, "input_size": (3, side, side)}
        self.sizes = [(2, *self.input["input_size"])]
        if own.local_crops:
            check_accepts(model, torch.zeros(1, *small["input_size"]))
            self.sizes.append((own.local_crops, *small["input_size"]))
        augmentation["crop_scale"] = own.local_scale
        small = train_transform(small, **augmentation, largest_crop=data.crop_scale)
        crops = MultiCrop(large, small, own.local_crops)
        workers, seed = self.config.machine.num_workers, self.config.run.seed
        self.train_set = with_transform(self.data.train, crops, seed, workers)

    def collate(self, items: Sequence[Any]) -> Batch:
        """Return the good images, or in training their `crops`, and the damaged ones' errors."""
        good, damaged = without_damaged(items)
        if not good or isinstance(good[0][0], Tensor):
            batch = super().collate(items)
            sizes = getattr(self, "sizes", ())
            return {**batch, "crops": [batch["images"].new_zeros(0, *size) for size in sizes]}
        several = [
            collate([(crops[n], *rest) for crops, *rest in good]) for n in range(len(good[0][0]))
        ]
        return {**several[0], "crops": [each["images"] for each in several], "damaged": damaged}

    def loss(self, forward: nn.Module, batch: Batch, moment: Moment) -> tuple[Tensor, int]:
        """Return the images' summed losses, and the number of images.

        The teacher, the moving average of the weights, sees the large crops alone. Its outputs are
        centred by the running mean of those of the passes before.
        """
        own, count = self.config.task, len(batch["indices"])
        crops = [at_least_one(each) for each in batch["crops"]]
        with autocast(crops[0].device, self.config.machine.precision):
            outputs = [each[:count].float() for each in forward(crops)]
            with torch.no_grad():
                wanted = moment.average(crops[:1])[0][:count].float()
        keeper = self.student.projection
        teacher = F.softmax((wanted - keeper.center) / own.teacher_temperature, dim=-1)
        keeper.move_center(wanted.flatten(0, 1), own.center_momentum)
        student = [F.log_softmax(each / own.student_temperature, dim=-1) for each in outputs]
        return crop_losses(student, teacher).sum(), count

    def evaluate(
        self,
        model: nn.Module,
        loader: DataLoader,
        accelerator: Accelerator,
        *,
        damaged: DamagedItems,
        between: Callable[[], None],
    ) -> NeighbourEvaluation:
        """Return how often nearest neighbours are of one class; labels serve nothing else."""

        def measure(batch: Batch) -> dict[str, Tensor]:
            images = batch["images"]
            with autocast(images.device, self.config.machine.precision):
                features = model(at_least_one(images))[: len(images)]
            return {"features": F.normalize(features.float(), dim=-1), "targets": batch["targets"]}

        rows = rows_of_items(measure, model, loader, accelerator, damaged=damaged, between=between)
        return NeighbourEvaluation(neighbour_accuracy(rows["features"], rows["targets"]))

    def report(self, result: TrainResult) -> Report:
        """Write the curves."""
        history, reached = result.metrics["history"], result.evaluation.neighbour_accuracy
        panels = [
            Curves("Cross-entropy of crops", "nats", {"train_loss": "training"}),
            Curves("Nearest neighbours", "%", {"test_neighbour_accuracy": "of one class"}, 100.0),
        ]
        caption = (
            "After each epoch: the loss, and the share of test images whose nearest other one, by"
            " the cosine of the teacher's features, is of their class."
        )
        sections = {
            "curves": section("Training", caption, learning_curves, *(history, panels)),
        }
        measured = {"nearest neighbours of one class": f"{reached:.2%}"}
        weights = result.run_dir / WEIGHTS_FILE
        next_command = f"vision-ttt train RECIPE --initial-weights {weights}"
        return Report(save(sections, result.run_dir), measured, {}, next_command)


def neighbour_accuracy(features: Tensor, targets: Tensor) -> float:
    """Share of the unit vectors [N, D] whose nearest other one has their class index [N]."""
    right = 0
    for start in range(0, len(features), _CHUNK):
        similar = features[start : start + _CHUNK] @ features.T
        own = torch.arange(len(similar))
        similar[own, own + start] = -torch.inf
        right += (targets[similar.argmax(1)] == targets[start : start + _CHUNK]).sum().item()
    return right / len(features)
