"""The section `task` of a run that pre-trains a backbone on masked images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from vision_ttt.engine.config import TaskSection, TrainConfig
from vision_ttt.engine.section import COUNT, INNER_FRACTION, number
from vision_ttt.tasks.images.config import ImageData, check_images

if TYPE_CHECKING:  # they need PyTorch
    from torch import nn

    from vision_ttt.engine.checkpoint import ModelMetadata
    from vision_ttt.tasks.masked_images.task import MaskedImages


@dataclass(frozen=True)
class MaskedImagesSection(TaskSection):
    """Pre-training without labels: prediction of masked patches (SimMIM)."""

    name: Literal["masked-images"] = "masked-images"
    """Name of the task."""
    mask_ratio: float = number(0.6, INNER_FRACTION)
    """Share of the image that is masked (0 to 1, exclusive), rounded up to whole squares."""
    mask_size: int = number(2, COUNT)
    """Side of the masked squares in patches; squares at the right and lower border may be cut."""

    DATA: ClassVar[type[ImageData]] = ImageData
    HOLDS: ClassVar[str] = (
        "a backbone trained on masked images (for vision-ttt eval, and for other tasks by"
        " --initial-weights)"
    )

    def check(self, config: TrainConfig) -> None:
        """Raise ConfigError where an image is to be seen more often than a batch has images."""
        check_images(config)

    def open(self, config: TrainConfig) -> MaskedImages:
        """Open the images."""
        from vision_ttt.tasks.masked_images.task import MaskedImages

        return MaskedImages(config)

    @classmethod
    def rebuild(cls, metadata: ModelMetadata) -> nn.Module:
        """Build the model that a checkpoint describes."""
        from vision_ttt.tasks.images.models import rebuild
        from vision_ttt.tasks.masked_images.model import build_masked_image_model

        cls(**metadata.task)  # checks it
        return rebuild(metadata, build_masked_image_model)

    @classmethod
    def reopen(
        cls, metadata: ModelMetadata, changes: Mapping[str, Any], **machine: Any
    ) -> MaskedImages:
        """Open a checkpoint's images again; see `vision_ttt.tasks.images.task`."""
        from vision_ttt.tasks.images.task import reopen

        return reopen(cls(**metadata.task), metadata, changes, **machine)
