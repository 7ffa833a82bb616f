"""The section `task` of a run that trains a diffusion model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from vision_ttt.engine.config import ConfigError, TaskSection, TrainConfig
from vision_ttt.engine.section import Range, number
from vision_ttt.tasks.images.config import ImageData, check_repeats

if TYPE_CHECKING:  # they need PyTorch and diffusers
    from torch import nn

    from vision_ttt.engine.checkpoint import ModelMetadata
    from vision_ttt.tasks.diffusion.task import Diffusion


_FIELDS = {"schedule": "noise_schedule", "steps": "noise_steps"}
"""What a process calls the section's fields."""


@dataclass(frozen=True)
class DiffusionSection(TaskSection):
    """Generation of images by denoising (models dit3_*)."""

    name: Literal["diffusion"] = "diffusion"
    """Name of the task."""
    objective: Literal["noise", "flow"] = "noise"
    """What the model learns to predict of a noisy image: noise, the noise, and the variances of
    denoising where the model has them; flow, the velocity from image to noise (flow matching)."""
    noise_schedule: Literal["linear", "cosine"] = "linear"
    """How the noise of objective noise grows."""
    noise_steps: int = number(1000, Range(2, 100_000, "from 2 to 100,000"))
    """Steps in which it grows (>= 2)."""

    DATA: ClassVar = ImageData
    HOLDS: ClassVar = "a diffusion model (for vision-ttt eval and sample)"

    def check(self, config: TrainConfig) -> None:
        """Raise ConfigError where a field would be ignored."""
        check_repeats(config)
        if self.objective == "flow":
            for name in ("noise_schedule", "noise_steps"):
                value, default = getattr(self, name), getattr(DiffusionSection, name)
                if value != default:
                    raise ConfigError(
                        f"{name} is {value!r}; objective is 'flow', whose noise has no schedule:"
                        f" leave it at {default!r}"
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

        return reopen(cls(**metadata.task), metadata, changes, **machine)
