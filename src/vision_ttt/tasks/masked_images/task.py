"""Training a backbone to fill in masked patches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from vision_ttt.engine.config import ConfigError
from vision_ttt.engine.damaged import DamagedItems
from vision_ttt.engine.evaluation import at_least_one, autocast, rows_of_items
from vision_ttt.engine.task import Batch, Metric, Moment, Report
from vision_ttt.engine.train import TrainResult
from vision_ttt.tasks.images.pretraining import start_backbone
from vision_ttt.tasks.images.task import ImageTask
from vision_ttt.tasks.masked_images.model import (
    build_masked_image_model,
    random_mask,
    standardised,
    to_patches,
)


@dataclass(frozen=True)
class MaskedEvaluation:
    """How well a model predicts the masked patches of N test images."""

    loss: float
    """Mean over the images of the mean absolute error of their masked, standardised patches."""
    constant_loss: float
    """The same of a model that predicts 0, the mean of each masked patch."""

    @property
    def metrics(self) -> dict[str, float]:
        """Both losses."""
        return {"loss": self.loss, "constant_loss": self.constant_loss}


class MaskedImages(ImageTask):
    """Mean absolute error of masked patches, each of mean 0 and variance 1 (SimMIM, MAE)."""

    primary = Metric("loss", higher_is_better=False)

    def build_model(self, name: str, arguments: Mapping[str, Any]) -> nn.Module:
        """Build the backbone with its mask token and the decoder."""
        return build_masked_image_model(name, arguments)

    def start_from(
        self, path: Path, model: nn.Module, name: str, model_args: Mapping[str, Any]
    ) -> str:
        """Start the backbone from weights of any task; mask token and decoder stay as they are."""
        return start_backbone(path, model, name, model_args)

    def prepare(self, model: nn.Module) -> None:
        """Set the images as `model` is to see them.

        Raises:
            ConfigError: the model does not accept them, or they are no grid to be masked.
        """
        super().prepare(model)
        self.patch_size = model.patch_size
        try:
            to_patches(self._watched, self.patch_size)
            self.masks(self._watched, [(0,)] * len(self._watched))
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def masks(self, images: Tensor, seeds: Sequence[tuple[int, ...]]) -> Tensor:
        """Return a random mask for each image [B, 3, H, W]: [B, T], each of its own seed."""
        own, sides = self.config.task, zip(images.shape[-2:], self.patch_size, strict=True)
        height, width = (length // patch for length, patch in sides)
        generators = (np.random.default_rng(seed) for seed in seeds)
        each = [
            random_mask((height, width), own.mask_ratio, own.mask_size, generator)
            for generator in generators
        ]
        masks = torch.stack(each) if each else torch.zeros(0, height * width, dtype=torch.bool)
        return masks.to(images.device)

    def augment(self, batch: Batch) -> Batch:
        """Return the batch with a mask for each image, a function of (seed, epoch, image)."""
        place = (self.config.run.seed, self.train_set.epoch)
        seeds = [(*place, index) for index in batch["indices"].tolist()]
        return {**batch, "masks": self.masks(batch["images"], seeds)}

    def loss(self, forward: nn.Module, batch: Batch, moment: Moment) -> tuple[Tensor, int]:
        """Return the images' summed errors, and the number of images."""
        losses, _ = self.errors(forward, batch["images"], batch["masks"])
        return losses.sum(), len(losses)

    def errors(self, forward: nn.Module, images: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
        """The error of each image [B], and that of a constant prediction for each patch."""
        seen, count = at_least_one(images), len(images)
        with autocast(images.device, self.config.machine.precision):
            predicted = forward(seen, at_least_one(masks))[:count].float()
        targets, _, _ = standardised(to_patches(images, self.patch_size))

        def mean(errors: Tensor) -> Tensor:
            return (errors.abs().mean(-1) * masks).sum(1) / masks.sum(1)

        return mean(predicted - targets), mean(targets)

    def evaluate(
        self,
        model: nn.Module,
        loader: DataLoader,
        accelerator: Accelerator,
        *,
        damaged: DamagedItems,
        between: Callable[[], None],
    ) -> MaskedEvaluation:
        """Return the errors under masks that are always the same for an image."""
        self.patch_size = model.patch_size

        def measure(batch: Batch) -> dict[str, Tensor]:
            images = batch["images"]
            masks = self.masks(images, [(index,) for index in batch["indices"].tolist()])
            losses, constant = self.errors(model, images, masks)
            return {"losses": losses, "constant": constant}

        rows = rows_of_items(measure, model, loader, accelerator, damaged=damaged, between=between)
        return MaskedEvaluation(
            *(rows[name].double().mean().item() for name in ("losses", "constant"))
        )

    def report(self, result: TrainResult) -> Report:
        """Write the curves and a sheet of reconstructions."""
        from vision_ttt.tasks.masked_images.report import write_report

        return write_report(self, result)
