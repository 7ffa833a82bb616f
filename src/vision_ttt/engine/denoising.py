"""The task of a diffusion model: to tell noise from image."""

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
from vision_ttt.engine.evaluate import BadImages, at_least_one, autocast, rows_of_images
from vision_ttt.engine.tasks import refuse_unused
from vision_ttt.models import DiT3


@dataclass(frozen=True)
class DenoisingEvaluation:
    """How well a model denoises N test images."""

    loss: float
    """Mean of `losses`."""
    losses: Tensor
    """The objective of each image [N], in the dataset's order, bad images left out."""
    targets: Tensor
    """Class indices [N]."""
    accuracy: None = None
    """Nothing is classified."""


class Denoising:
    """The objective of `config`, at a random time of each image."""

    def __init__(self, config: TrainConfig, model: DiT3) -> None:
        """Raises:
        ConfigError: the config has what only classifiers know, or does not fit the model.
        """
        if config.mixes_images:
            raise ConfigError(
                f"mixup is {config.mixup} and cutmix {config.cutmix}; images of a diffusion model"
                " are of one class, both must be 0"
            )
        if config.label_smoothing:  # off, or as it is by default
            refuse_unused(config, ("label_smoothing",), f"{config.model} classifies nothing")
        if config.objective == "flow":
            names = ("noise_schedule", "noise_steps")
            refuse_unused(config, names, "objective is 'flow', whose noise has no schedule")
        if config.objective == "flow" and model.learn_sigma:
            raise ConfigError(
                "objective is 'flow', which has no variances to learn; set --model-args.learn_sigma"
                " false, or --objective noise"
            )
        self.precision = config.precision
        options: dict[str, Any] = {}
        if config.objective == "noise":
            options = {"schedule": config.noise_schedule, "steps": config.noise_steps}
        self.process = make_process(config.objective, **options)

    @property
    def diffusion(self) -> dict[str, Any]:
        """What sampling needs to know: the arguments of `make_process`."""
        return self.process.describe()

    def loss(self, forward: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
        """The images' summed objective, times and noise drawn from torch's own generator."""
        seen, labels = _padded(images, targets)
        places, noise = draw(seen)
        return self._losses(forward, seen, labels, places, noise)[: len(images)].sum()

    def evaluate(
        self,
        model: nn.Module,
        loader: DataLoader,
        accelerator: Accelerator,
        *,
        bad_images: BadImages,
        between: Callable[[], None],
    ) -> DenoisingEvaluation:
        """The objective at a time and with noise that are always the same for an image."""

        def losses(images: Tensor, targets: Tensor, indices: Tensor) -> Tensor:
            seen, labels = _padded(images, targets)
            own = [
                draw(image[None], torch.Generator().manual_seed(index))
                for image, index in zip(seen, indices.tolist() or [0], strict=True)
            ]
            places, noise = (torch.cat(each) for each in zip(*own, strict=True))
            return self._losses(model, seen, labels, places, noise)[: len(images)]

        rows, targets = rows_of_images(
            losses, model, loader, accelerator, bad_images=bad_images, between=between
        )
        return DenoisingEvaluation(rows.double().mean().item(), rows, targets)

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
