"""What a model is trained for: the loss of a micro-batch, and what test images tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from vision_ttt.engine.config import ConfigError, TrainConfig
from vision_ttt.engine.evaluate import BadImages, Evaluation, at_least_one, autocast, evaluate
from vision_ttt.models import DiT3


class TestResult(Protocol):
    """What every evaluation tells."""

    loss: float
    """Mean over the test images."""
    accuracy: float | None
    """From 0 to 1; None where nothing is classified."""


class Task(Protocol):
    """What differs from one kind of model to the other in the one training loop."""

    diffusion: dict[str, Any] | None
    """What sampling needs to know of the training; None for a classifier."""

    def loss(self, forward: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
        """The images' summed loss [], without images zero, but of the model's graph."""

    def evaluate(
        self,
        model: nn.Module,
        loader: DataLoader,
        accelerator: Accelerator,
        *,
        bad_images: BadImages,
        between: Callable[[], None],
    ) -> TestResult:
        """What the test images tell of a model."""


class Classification:
    """Cross-entropy of class logits."""

    diffusion = None

    def __init__(self, config: TrainConfig) -> None:
        """Raises:
        ConfigError: the config has what only diffusion models know.
        """
        refuse_unused(
            config,
            ("objective", "noise_schedule", "noise_steps"),
            f"{config.model} is a classifier, which knows no noise",
        )
        self.precision = config.precision
        # Mixing smooths its labels itself.
        self.smoothing = 0.0 if config.mixes_images else config.label_smoothing

    def loss(self, forward: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy in nats; targets are class indices [B], or probabilities [B, C]."""
        seen = at_least_one(images)
        with autocast(images.device, self.precision):
            logits = forward(seen)[: len(images)].float()
        if not len(images):
            return logits.sum()
        return F.cross_entropy(logits, targets, label_smoothing=self.smoothing, reduction="sum")

    def evaluate(
        self,
        model: nn.Module,
        loader: DataLoader,
        accelerator: Accelerator,
        *,
        bad_images: BadImages,
        between: Callable[[], None],
    ) -> Evaluation:
        """Loss, accuracy and every prediction."""
        return evaluate(
            model,
            loader,
            accelerator,
            bad_images=bad_images,
            precision=self.precision,
            between=between,
        )


def refuse_unused(config: TrainConfig, names: tuple[str, ...], reason: str) -> None:
    """Refuse fields that would be ignored, where they are not what they are by default.

    Raises:
        ConfigError: one is not.
    """
    for name in names:
        value, default = getattr(config, name), getattr(TrainConfig, name)
        if value != default:
            raise ConfigError(f"{name} is {value!r}; {reason}: leave it at {default!r}")


def make_task(config: TrainConfig, model: nn.Module) -> Task:
    """The task that a model is for.

    Raises:
        ConfigError: the config does not fit it.
    """
    if not isinstance(model, DiT3):
        return Classification(config)
    # Needs diffusers, which classifiers do without.
    from vision_ttt.engine.denoising import Denoising

    return Denoising(config, model)
