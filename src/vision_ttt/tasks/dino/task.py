"""Training a backbone to say the same of every crop of an image."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from vision_ttt.data import collate, with_transform
from vision_ttt.data.loading import without_damaged
from vision_ttt.engine.checkpoint import WEIGHTS_FILE
from vision_ttt.engine.config import ConfigError
from vision_ttt.engine.damaged import DamagedItems
from vision_ttt.engine.evaluation import at_least_one, autocast, rows_of_items
from vision_ttt.engine.loaders import evaluation_loader
from vision_ttt.engine.task import Batch, Metric, Moment, Report
from vision_ttt.engine.train import TrainResult
from vision_ttt.tasks.dino.crops import fixed_crops, multi_crop
from vision_ttt.tasks.dino.evaluation import NEIGHBOURS, DinoEvaluation, neighbour_accuracy
from vision_ttt.tasks.dino.model import DinoModel, build_dino
from vision_ttt.tasks.figures import Curves, learning_curves, save, section
from vision_ttt.tasks.images.models import check_accepts
from vision_ttt.tasks.images.pretraining import start_backbone
from vision_ttt.tasks.images.task import ImageTask, test_transform


class Dino(ImageTask):
    """Cross-entropy between a teacher's and a student's outputs of different crops (DINO)."""

    primary = Metric("neighbour_accuracy", higher_is_better=True, form=".2%")
    student: DinoModel
    """The model that is trained, from `prepare` on; it keeps the center."""
    sizes: Sequence[tuple[int, ...]] = ()
    """Of an image's global and local crops, likewise."""

    def build_model(self, name: str, arguments: Mapping[str, Any]) -> nn.Module:
        """Build the backbone with its head."""
        return build_dino(name, arguments, self.config.task)

    def start_from(
        self, path: Path, model: nn.Module, name: str, model_args: Mapping[str, Any]
    ) -> str:
        """Start the backbone from weights of any task; the head stays as it is."""
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
                local crops.
        """
        super().prepare(model)
        self.student, own = model, self.config.task
        size, side = self.input["input_size"][1:], self.local_side(model)
        self.sizes = [(2, 3, *size)]
        if own.local_crops:
            check_accepts(model, torch.zeros(1, 3, side, side))
            self.sizes.append((own.local_crops, 3, side, side))
        crops = multi_crop(own, self.config.data, self.input, side)
        workers, seed = self.config.machine.num_workers, self.config.run.seed
        self.train_set = with_transform(self.data.train, crops, seed, workers)

    def local_side(self, model: DinoModel) -> int:
        """Height and width of local crops."""
        patch = max(model.backbone.patch_embed.patch_size)
        half = max(1, self.input["input_size"][1] // (2 * patch)) * patch
        return self.config.task.local_size or half

    @property
    def collate(self) -> Callable[[Sequence[Any]], Batch]:
        """Returns the good images, or in training their `crops`, and the damaged ones' errors."""
        return partial(_batch_of_crops, super().collate, self.sizes)

    def loss(self, forward: nn.Module, batch: Batch, moment: Moment) -> tuple[Tensor, int]:
        """Return the images' summed losses, and the number of images.

        The teacher, the moving average of the weights, sees the global crops alone. Its outputs are
        centred by the running mean of those of the passes before.
        """
        count, criterion = len(batch["indices"]), self.student.criterion
        crops = [at_least_one(each) for each in batch["crops"]]
        with autocast(crops[0].device, self.config.machine.precision):
            outputs = forward(crops).float()
            with torch.no_grad():
                wanted = moment.average(crops[:1]).float()
        heat = self.teacher_temperature(moment.done)
        loss = criterion(wanted.unbind(1), outputs.unbind(1), heat)
        criterion.move_center(wanted[:count].flatten(0, 1))
        # The averaged model, which is evaluated and saved, has this center, not an average of it.
        moment.average.criterion.center.copy_(criterion.center)
        return loss * count, count

    def teacher_temperature(self, done: float) -> float:
        """Return the temperature where a share `done` of the run is behind."""
        own = self.config.task
        risen = min(1.0, done / own.temperature_warmup) if own.temperature_warmup else 1.0
        first = own.first_teacher_temperature
        return first + risen * (own.teacher_temperature - first)

    def average_decay(self, moment: Moment) -> float:
        """Return the teacher's decay: from `ema_decay` to 1 by a cosine."""
        left = (1 + math.cos(math.pi * moment.done)) / 2
        return 1 - (1 - self.config.optimisation.ema_decay) * left

    def held_parameters(self, moment: Moment) -> Iterable[nn.Parameter]:
        """Return those of the head's last layer in the first epochs."""
        held = moment.epoch < self.config.task.frozen_epochs
        return self.student.projection.last_layer.parameters() if held else ()

    def evaluate(
        self,
        model: DinoModel,
        loader: DataLoader,
        accelerator: Accelerator,
        *,
        damaged: DamagedItems,
        between: Callable[[], None],
    ) -> DinoEvaluation:
        """Return the teacher's loss, and how often the nearest training images give the class.

        Labels serve nothing else.
        """
        own, machine = self.config.task, self.config.machine
        side = self.local_side(model)

        def features(batch: Batch) -> dict[str, Tensor]:
            images = batch["images"]
            with autocast(images.device, machine.precision):
                found = model(at_least_one(images))[: len(images)].float()
            return {"features": F.normalize(found, dim=-1), "targets": batch["targets"]}

        def measure(batch: Batch) -> dict[str, Tensor]:
            images = batch["images"]
            crops = fixed_crops(at_least_one(images), side, own)
            with autocast(images.device, machine.precision):
                outputs = model(crops).float()
            losses = [
                model.criterion(each[:, :2].unbind(1), each.unbind(1), own.teacher_temperature)
                for each in outputs.split(1)
            ]
            return {**features(batch), "losses": torch.stack(losses)[: len(images)]}

        known_set = with_transform(
            *(self.data.train, test_transform(self.input, None), 0, machine.num_workers)
        )
        known_loader = evaluation_loader(
            known_set,
            loader.batch_size,
            self.collate,
            accelerator,
            num_workers=machine.num_workers,
            timeout=machine.loader_timeout,
        )
        options = {"damaged": damaged, "between": between}
        known = rows_of_items(features, model, known_loader, accelerator, **options)
        rows = rows_of_items(measure, model, loader, accelerator, **options)
        accuracy = neighbour_accuracy(
            *(rows["features"], rows["targets"], known["features"], known["targets"])
        )
        return DinoEvaluation(rows["losses"].double().mean().item(), accuracy)

    def report(self, result: TrainResult) -> Report:
        """Write the curves."""
        history, found = result.metrics["history"], result.evaluation
        panels = [
            Curves("Cross-entropy", "nats", {"train_loss": "training", "test_loss": "test"}),
            Curves("Nearest neighbours", "%", {"test_neighbour_accuracy": "test"}, scale=100.0),
        ]
        uniform = math.log(self.config.task.outputs)
        caption = (
            "The loss, of student and teacher in training and of the teacher"
            f" alone at test ({uniform:.2f} if all outputs are equal), and the share of test images"
            f" that their {NEIGHBOURS} nearest training images classify rightly, by the cosine of"
            " the teacher's features."
        )
        sections = {
            "curves": section("Training", caption, learning_curves, *(history, panels)),
        }
        measured = {
            "test loss": f"{found.loss:.4f}",
            f"{NEIGHBOURS} nearest neighbours": f"{found.neighbour_accuracy:.2%}",
        }
        weights = result.run_dir / WEIGHTS_FILE
        next_command = ("train", "RECIPE", "--initial-weights", str(weights))
        return Report(save(sections, result.run_dir), measured, {}, next_command)


def _batch_of_crops(
    images: Callable[[Sequence[Any]], Batch], sizes: Sequence[tuple[int, ...]], items: Sequence[Any]
) -> Batch:
    good, damaged = without_damaged(items)
    if not good or isinstance(good[0][0], Tensor):
        batch = images(items)
        return {**batch, "crops": [batch["images"].new_zeros(0, *size) for size in sizes]}
    batch = collate([(crops[0], *rest) for crops, *rest in good])
    others = [torch.stack([item[0][n] for item in good]) for n in range(1, len(sizes))]
    return {**batch, "crops": [batch.pop("images"), *others], "damaged": damaged}
