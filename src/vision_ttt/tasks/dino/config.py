"""The section `task` of a run that pre-trains a backbone by self-distillation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from vision_ttt.engine.config import ConfigError, TaskSection, TrainConfig
from vision_ttt.engine.section import (
    COUNT,
    FRACTION,
    POSITIVE,
    PROBABILITY,
    SHARE,
    Range,
    number,
    refuse_unused,
)
from vision_ttt.errors import UserError
from vision_ttt.extras import require
from vision_ttt.tasks.images.config import ImageData, check_images

if TYPE_CHECKING:  # they need PyTorch
    from torch import nn

    from vision_ttt.engine.checkpoint import ModelMetadata
    from vision_ttt.tasks.dino.task import Dino

_UNUSED = ("crop_scale", "crop_ratio", "auto_augment", "random_erasing")
_IGNORED_WITHOUT = {
    "local_crops": ("local_size", "local_scale"),
    "temperature_warmup": ("first_teacher_temperature",),
}
_STRONGEST_JITTER = 2.0  # its quarter is the shift of the hue, at most half a turn


@dataclass(frozen=True)
class DinoSection(TaskSection):
    """Pre-training without labels: self-distillation between crops (DINO).

    The teacher is the weights' moving average. Its decay rises from optimisation.ema_decay to 1 by
    a cosine.
    """

    name: Literal["dino"] = "dino"
    """Name of the task."""
    outputs: int = number(65_536, Range(2, 262_144, "from 2 to 262,144"))
    """Outputs of the projection head, whose softmax is compared."""
    hidden_dim: int = number(2048, Range(1, 16_384, "from 1 to 16,384"))
    """Width of the head's two hidden layers."""
    bottleneck_dim: int = number(256, Range(1, 1024, "from 1 to 1,024"))
    """Width of the head before its last layer."""
    global_scale: float = number(0.4, FRACTION)
    """Smallest area of the two global crops, and largest area of local ones, as a fraction of the
    image (>0 to 1)."""
    local_crops: int = number(8, Range(0, 64, "from 0 to 64"))
    """Local crops of each image, which the student alone sees."""
    local_size: int | None = number(None, COUNT)
    """Height and width of local crops in pixels; null: half of the image size, in whole patches."""
    local_scale: float = number(0.05, FRACTION)
    """Smallest area of local crops, as a fraction of the image (>0 to 1)."""
    blur: float = number(2.0, Range(0.1, 100.0, "from 0.1 to 100"))
    """Largest standard deviation of the Gaussian blur in pixels; the smallest is 0.1."""
    solarize: float = number(0.2, PROBABILITY)
    """Probability that the second global crop is solarised (0 to 1)."""
    student_temperature: float = number(0.1, POSITIVE)
    """Divisor of the student's outputs."""
    teacher_temperature: float = number(0.07, POSITIVE)
    """Divisor of the teacher's outputs, after its warm-up and at test."""
    first_teacher_temperature: float = number(0.04, POSITIVE)
    """Divisor of the teacher's outputs at the start of the warm-up, which is linear."""
    temperature_warmup: float = number(0.3, PROBABILITY)
    """Length of that warm-up, as a share of the run (0 to 1)."""
    center_momentum: float = number(0.9, SHARE)
    """Decay of the running mean of the teacher's outputs, which is subtracted from them (0 to
    <1)."""
    frozen_epochs: int = number(1, Range(0, float("inf"), "at least 0"))
    """First epochs in which the head's last layer does not learn."""

    DATA: ClassVar[type[ImageData]] = ImageData
    HOLDS: ClassVar[str] = (
        "a backbone trained by self-distillation (for vision-ttt eval, and for other tasks by"
        " --initial-weights)"
    )

    def check(self, config: TrainConfig) -> None:
        """Raise ConfigError unless local crops are the smaller ones, and no field is ignored."""
        check_images(config)
        if self.local_crops and self.local_scale > self.global_scale:
            raise ConfigError(
                f"local_scale is {self.local_scale}; it must be at most global_scale"
                f" ({self.global_scale})"
            )
        why = "the task dino makes crops of its own (global_scale, local_scale)"
        refuse_unused(config.data, _UNUSED, why)
        for switch, names in _IGNORED_WITHOUT.items():
            if not getattr(self, switch):
                refuse_unused(self, names, f"{switch} is 0")
        if config.data.color_jitter > _STRONGEST_JITTER:
            raise ConfigError(
                f"color_jitter is {config.data.color_jitter}; it must be at most"
                f" {_STRONGEST_JITTER:g} in the task dino, which shifts the hue by a quarter of it"
            )

    def open(self, config: TrainConfig) -> Dino:
        """Open the images."""
        require("ssl", "the task dino")
        from vision_ttt.tasks.dino.task import Dino

        return Dino(config)

    @classmethod
    def rebuild(cls, metadata: ModelMetadata) -> nn.Module:
        """Build the model that a checkpoint describes."""
        require("ssl", cls.HOLDS)
        from vision_ttt.tasks.dino.model import build_dino
        from vision_ttt.tasks.images.models import rebuild

        section = cls(**metadata.task)
        return rebuild(metadata, lambda name, own: build_dino(name, own, section))

    @classmethod
    def reopen(
        cls, metadata: ModelMetadata, changes: Mapping[str, Any], *, part: str, **machine: Any
    ) -> Dino:
        """Open a checkpoint's images again; see `vision_ttt.tasks.images.task`.

        Raises:
            UserError: the part is not the test images; those of training are their neighbours.
        """
        from vision_ttt.tasks.images.task import reopen

        if part != "test":
            raise UserError(
                f"part is {part!r} (--split); it must be 'test', as test images are classified by"
                " their nearest training images"
            )
        return reopen(cls(**metadata.task), metadata, changes, part=part, **machine)
