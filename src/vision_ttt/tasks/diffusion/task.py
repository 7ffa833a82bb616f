"""Training a diffusion model: to separate noise from image."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from vision_ttt.data import evaluation_transform
from vision_ttt.diffusion import draw, make_process
from vision_ttt.engine.config import ConfigError, TrainConfig
from vision_ttt.engine.damaged import DamagedItems
from vision_ttt.engine.evaluation import at_least_one, autocast, rows_of_items
from vision_ttt.engine.task import Batch, Metric, Moment, Report
from vision_ttt.engine.train import TrainResult
from vision_ttt.models import DiT3
from vision_ttt.tasks.diffusion.latents import (
    Autoencoder,
    LatentImages,
    cache_latents,
    latent_items,
)
from vision_ttt.tasks.diffusion.pictures import CENTRED, to_pixels
from vision_ttt.tasks.images.models import check_accepts, data_config
from vision_ttt.tasks.images.task import ImageTask, spread_images

_WATCHED = 32  # latents


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
        self.autoencoder = None if own.autoencoder is None else Autoencoder(own.autoencoder)

    def model_arguments(self) -> dict[str, Any]:
        """As of every task on images; of latents the size is that of their grid.

        Raises:
            ConfigError: as in :meth:`ImageTask.model_arguments`, or the image is no whole cells.
        """
        arguments = super().model_arguments()
        if self.autoencoder is None:
            return arguments
        size, factor = self.config.data.image_size, self.autoencoder.factor
        if size % factor:
            raise ConfigError(f"image_size is {size}; latents need a multiple of {factor}")
        return {**arguments, "in_chans": self.autoencoder.channels, "img_size": size // factor}

    def prepare(self, model: nn.Module) -> None:
        """Set the images as `model` is to see them, latents encoded where they are not on disk.

        Raises:
            ConfigError: the model is none for this task, or does not accept them.
            DatasetError: the latents that are on disk are others.
        """
        if self.autoencoder is None:
            super().prepare(model)
            return
        self.check_model(model)
        self.input = data_config(model)
        seed = self.config.run.seed
        folder = Path(self.config.task.latents).expanduser()
        flip = self.config.data.horizontal_flip
        train, test = self._latents("train", folder, flip > 0), self._latents("test", folder)
        self.train_set = latent_items(train, seed, flip=flip)
        self.test_set = latent_items(test, seed, flip=None)
        self._watched = spread_images(self.test_set, _WATCHED)
        check_accepts(model, self._watched[:1])

    def prepare_part(self, part: str) -> None:
        """Set `test_set` to a part of the data, with latents encoded into a temporary folder."""
        if self.autoencoder is None:
            super().prepare_part(part)
            return
        self._scratch = TemporaryDirectory(prefix="vision-ttt-latents-")
        latents = self._latents(part, Path(self._scratch.name))
        self.test_set = latent_items(latents, 0, flip=None)

    def _latents(self, part: str, folder: Path, mirrored: bool = False) -> LatentImages:
        own, data = self.config.task, self.config.data
        size = data.image_size
        config = {**CENTRED, "input_size": (3, size, size), "crop_mode": "center"}
        config |= {"interpolation": "bicubic", "crop_pct": data.crop_fraction or 1.0}
        asked = {**asdict(self.source), "autoencoder": own.autoencoder, "image_size": size}
        if self.data.held_out:  # otherwise nothing is drawn
            asked["held_out"] = self.data.held_out
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return cache_latents(
            folder,
            part,
            self.data.part(part),
            evaluation_transform(config),
            self.autoencoder.to(device),
            {**asked, "crop_fraction": config["crop_pct"]},
            mirrored=mirrored,
        )

    def pixels(self, samples: Tensor) -> Tensor:
        """Grey levels [N, 3, H, W] uint8 of samples, of latents by the autoencoder."""
        if self.autoencoder is None:
            return to_pixels(samples, self.input)
        return to_pixels(self.autoencoder.decode(samples), CENTRED)

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
