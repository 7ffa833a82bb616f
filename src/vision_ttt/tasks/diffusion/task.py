"""Training a diffusion model: to separate noise from image."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from vision_ttt.diffusion import draw, make_process
from vision_ttt.engine.config import ConfigError, TrainConfig
from vision_ttt.engine.damaged import DamagedItems
from vision_ttt.engine.evaluation import at_least_one, autocast, rows_of_items
from vision_ttt.engine.task import Batch, Metric, Moment, Report
from vision_ttt.engine.train import TrainResult
from vision_ttt.models import DiT3
from vision_ttt.tasks.images.task import ImageTask


@dataclass(frozen=True)
class DenoisingEvaluation:
    """How well a model denoises N test images."""

    loss: float
    """Mean of `losses`."""
    losses: Tensor
    """The objective of each image [N], in the dataset's order, damaged images left out."""
    targets: Tensor
    """Class indices [N]."""

    @property
    def metrics(self) -> dict[str, float]:
        """The loss."""
        return {"loss": self.loss}


class Diffusion(ImageTask):
    """The objective of the config, at a random time of each image."""

    primary = Metric("loss", higher_is_better=False)

    def __init__(self, config: TrainConfig) -> None:
        """Open the images; raises as :class:`ImageTask` does."""
        super().__init__(config)
        own = config.task
        self.precision = config.machine.precision
        options: dict[str, Any] = {}
        if own.objective == "noise":
            options = {"schedule": own.noise_schedule, "steps": own.noise_steps}
        self.process = make_process(own.objective, **options)

    def check_model(self, model: nn.Module) -> None:
        """Raise ConfigError where the model does not denoise, or not by this objective."""
        if not isinstance(model, DiT3):
            raise ConfigError(
                f"model {self.config.model.name} does not denoise; task diffusion trains dit3_*"
            )
        if self.config.task.objective == "flow" and model.learn_sigma:
            raise ConfigError(
                "objective is 'flow', which has no variances to learn; set --arguments.learn_sigma"
                " false, or --objective noise"
            )

    def loss(self, forward: nn.Module, batch: Batch, moment: Moment) -> tuple[Tensor, int]:
        """Return the images' summed objective, times and noise drawn from the global generator."""
        images = batch["images"]
        seen, labels = _padded(images, batch["targets"])
        places, noise = draw(seen)
        losses = self._losses(forward, seen, labels, places, noise)
        return losses[: len(images)].sum(), len(images)

    def evaluate(
        self,
        model: nn.Module,
        loader: DataLoader,
        accelerator: Accelerator,
        *,
        damaged: DamagedItems,
        between: Callable[[], None],
    ) -> DenoisingEvaluation:
        """Return the objective at a time and with noise that are always the same for an image."""

        def measure(batch: Batch) -> dict[str, Tensor]:
            seen, labels = _padded(batch["images"], batch["targets"])
            own = [
                draw(image[None], torch.Generator().manual_seed(index))
                for image, index in zip(seen, batch["indices"].tolist() or [0], strict=True)
            ]
            places, noise = (torch.cat(each) for each in zip(*own, strict=True))
            losses = self._losses(model, seen, labels, places, noise)
            return {"losses": losses[: len(batch["images"])].float(), "targets": batch["targets"]}

        rows = rows_of_items(measure, model, loader, accelerator, damaged=damaged, between=between)
        losses = rows["losses"]
        return DenoisingEvaluation(losses.double().mean().item(), losses, rows["targets"])

    def carried(self) -> dict[str, Any]:
        """Return what images carry, and the process: the arguments of `make_process`."""
        return {**super().carried(), "process": self.process.describe()}

    def report(self, result: TrainResult) -> Report:
        """Write the curves and samples of every class."""
        from vision_ttt.tasks.diffusion.report import write_report

        return write_report(self, result)

    def _losses(
        self, forward: nn.Module, images: Tensor, labels: Tensor, places: Tensor, noise: Tensor
    ) -> Tensor:
        def predict(noisy: Tensor, times: Tensor, labels: Tensor) -> Tensor:
            with autocast(noisy.device, self.precision):
                return forward(noisy, times, labels)

        return self.process.losses(predict, images, labels, places, noise)


def _padded(images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Images and labels, or an empty image of class 0."""
    return at_least_one(images), targets if len(targets) else targets.new_zeros(1)
