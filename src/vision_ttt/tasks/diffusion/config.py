"""The section `task` of a run that trains a diffusion model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from vision_ttt.engine.config import ConfigError, TaskSection, TrainConfig
from vision_ttt.engine.section import Range, number, refuse_unused
from vision_ttt.tasks.images.config import ImageData, check_images

if TYPE_CHECKING:  # they need PyTorch and diffusers
    from torch import nn

    from vision_ttt.engine.checkpoint import ModelMetadata
    from vision_ttt.tasks.diffusion.task import Diffusion


_FIELDS = {"schedule": "noise_schedule", "steps": "noise_steps"}
"""What a process calls the section's fields."""
_WITHOUT_AUGMENTATION = {
    **{"crop_scale": 1.0, "crop_ratio": 1.0, "color_jitter": 0.0},
    **{"auto_augment": None, "random_erasing": 0.0},
}
"""Fields of the data that latents of centre crops require."""


@dataclass(frozen=True)
class DiffusionSection(TaskSection):
    """Generation of images by denoising (models dit3_*)."""

    name: Literal["diffusion"] = "diffusion"
    """Name of the task."""
    objective: Literal["noise", "flow"] = "noise"
    """What the model learns to predict of a noisy image: noise, the noise, and the variances of
    denoising where the model has them; flow, the velocity from image to noise (flow matching)."""
    noise_schedule: Literal["linear", "cosine"] = "linear"
    """Noise schedule, for objective noise."""
    noise_steps: int = number(1000, Range(2, 100_000, "from 2 to 100,000"))
    """Number of noise steps, for objective noise (>= 2)."""
    autoencoder: str | None = None
    """Autoencoder of diffusers (AutoencoderKL) whose latents are denoised in place of pixels: a
    folder, or a name in the local cache of Hugging Face's hub; null: none."""
    latents: str | None = None
    """Folder in which the latents of the images are kept, encoded by the first run."""

    DATA: ClassVar[type[ImageData]] = ImageData
    HOLDS: ClassVar[str] = "a diffusion model (for vision-ttt eval and sample)"

    def check(self, config: TrainConfig) -> None:
        """Raise ConfigError where a field would be ignored."""
        check_images(config)
        self._check_latents(config)
        if self.objective == "flow":
            why = "objective is 'flow', whose noise has no schedule"
            refuse_unused(self, ("noise_schedule", "noise_steps"), why)

    def _check_latents(self, config: TrainConfig) -> None:
        if (self.autoencoder is None) != (self.latents is None):
            raise ConfigError(
                f"autoencoder is {self.autoencoder!r} and latents is {self.latents!r}; give both or"
                " neither"
            )
        if self.autoencoder is None:
            return
        if config.data.image_size is None:
            raise ConfigError("image_size is null; images that are encoded have a size in pixels")
        for name, value in _WITHOUT_AUGMENTATION.items():
            if (given := getattr(config.data, name)) != value:
                raise ConfigError(
                    f"{name} is {given!r}; latents are of centre crops, mirrored or not: it must be"
                    f" {value!r}"
                )

    def open(self, config: TrainConfig) -> Diffusion:
        """Open the images."""
        from vision_ttt.tasks.diffusion.task import Diffusion

        return Diffusion(config)

    @classmethod
    def rebuild(cls, metadata: ModelMetadata) -> nn.Module:
        """Build the model that a checkpoint describes."""
        from vision_ttt.tasks.images.models import rebuild

        process = metadata.carried["process"]
        if not isinstance(process, dict):
            raise TypeError("process must be a mapping")
        own = {_FIELDS.get(name, name): value for name, value in process.items()}
        cls(**own)  # checks it
        cls(**metadata.task)
        return rebuild(metadata)

    @classmethod
    def reopen(
        cls, metadata: ModelMetadata, changes: Mapping[str, Any], **machine: Any
    ) -> Diffusion:
        """Open a checkpoint's images again; see `vision_ttt.tasks.images.task`."""
        from vision_ttt.tasks.images.task import reopen

        section = cls(**metadata.task)
        if section.autoencoder is not None:
            # The size of the images that are encoded is the model's, whatever the dataset.
            sizes = {name: metadata.data.get(name) for name in ("image_size", "crop_fraction")}
            changes = {**_WITHOUT_AUGMENTATION, **sizes, **changes}
        return reopen(section, metadata, changes, **machine)
