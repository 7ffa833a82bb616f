"""The section `task` of a run that pre-trains a backbone by self-distillation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from vision_ttt.engine.config import ConfigError, TaskSection, TrainConfig
from vision_ttt.engine.section import COUNT, FRACTION, POSITIVE, SHARE, Range, number
from vision_ttt.tasks.images.config import ImageData, check_images

if TYPE_CHECKING:  # they need PyTorch
    from torch import nn

    from vision_ttt.engine.checkpoint import ModelMetadata
    from vision_ttt.tasks.dino.task import Dino


@dataclass(frozen=True)
class DinoSection(TaskSection):
    """Pre-training without labels by self-distillation between crops (DINO).

    The teacher is the weights' moving average (optimisation.ema_decay); it is evaluated and saved.
    """

    name: Literal["dino"] = "dino"
    """Name of the task."""
    outputs: int = number(4096, Range(2, 1_000_000, "from 2 to 1,000,000"))
    """Outputs of the projection, whose softmax is compared (65,536 in the paper)."""
    local_crops: int = number(8, Range(0, 64, "from 0 to 64"))
    """Small crops of each image, which the student alone sees, beside two large ones."""
    local_size: int | None = number(None, COUNT)
    """Height and width of small crops in pixels; null: half of the large ones', in whole
    patches."""
    local_scale: float = number(0.05, FRACTION)
    """Smallest area of small crops, as a fraction of the image (>0 to 1). Their largest area is the
    smallest of large crops, data.crop_scale."""
    student_temperature: float = number(0.1, POSITIVE)
    """Divisor of the student's outputs."""
    teacher_temperature: float = number(0.04, POSITIVE)
    """Divisor of the teacher's outputs."""
    center_momentum: float = number(0.9, SHARE)
    """Decay of the running mean of the teacher's outputs, which is subtracted from them (0 to
    <1)."""

    DATA: ClassVar = ImageData
    HOLDS: ClassVar = (
        "a backbone trained by self-distillation (for vision-ttt eval, and for other tasks by"
        " --initial-weights)"
    )

    def check(self, config: TrainConfig) -> None:
        """Raise ConfigError unless small crops are the smaller ones."""
        check_images(config)
        if self.local_crops and self.local_scale > config.data.crop_scale:
            raise ConfigError(
                f"local_scale is {self.local_scale}; it must be at most crop_scale"
                f" ({config.data.crop_scale})"
            )

    def open(self, config: TrainConfig) -> Dino:
        """Open the images."""
        from vision_ttt.tasks.dino.task import Dino

        return Dino(config)

    @classmethod
    def rebuild(cls, metadata: ModelMetadata) -> nn.Module:
        """Build the model that a checkpoint describes."""
        from vision_ttt.tasks.dino.model import OUTPUTS, build_dino
        from vision_ttt.tasks.images.models import rebuild

        cls(**{**metadata.task, "outputs": metadata.model_args[OUTPUTS]})  # checks them
        return rebuild(metadata, build_dino)

    @classmethod
    def reopen(cls, metadata: ModelMetadata, changes: Mapping[str, Any], **machine: Any) -> Dino:
        """Open a checkpoint's images again; see `vision_ttt.tasks.images.task`."""
        from vision_ttt.tasks.images.task import reopen

        return reopen(cls(**metadata.task), metadata, changes, **machine)
