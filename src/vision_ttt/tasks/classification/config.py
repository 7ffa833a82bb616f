"""The section `task` of a run that trains a classifier of images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from vision_ttt.engine.config import ConfigError, TaskSection, TrainConfig
from vision_ttt.engine.section import NOT_NEGATIVE, SHARE, number, refuse_unused
from vision_ttt.tasks.images.config import ImageData, check_images

if TYPE_CHECKING:  # they need PyTorch
    from torch import nn

    from vision_ttt.engine.checkpoint import ModelMetadata
    from vision_ttt.tasks.classification.predict import ClassPredictor
    from vision_ttt.tasks.classification.task import Classification


@dataclass(frozen=True)
class ClassificationSection(TaskSection):
    """Classification of images by cross-entropy."""

    name: Literal["classification"] = "classification"
    """Name of the task."""
    mixup: float = number(0.0, NOT_NEGATIVE)
    """Alpha of mixup's Beta distribution (>= 0); 0: no mixup."""
    cutmix: float = number(0.0, NOT_NEGATIVE)
    """Alpha of CutMix's Beta distribution (>= 0); 0: no CutMix. With both, each batch uses one."""
    label_smoothing: float = number(0.1, SHARE)
    """Probability mass spread evenly over all classes (0 to <1)."""
    self_distillation: float = number(0.0, NOT_NEGATIVE)
    """Weight of the cross-entropy against what the weights' moving average predicts (MESA, with
    which H-ViT³'s best weights were trained, at 1); needs optimisation.ema_decay. 0: none."""
    self_distillation_start: float = number(0.25, SHARE)
    """Share of the run after which self-distillation begins (0 to <1)."""

    DATA: ClassVar[type[ImageData]] = ImageData
    KEEPS_PROPORTIONS: ClassVar[bool] = True
    HOLDS: ClassVar[str] = "a classifier (for vision-ttt eval, predict and export)"

    @property
    def mixes_images(self) -> bool:
        """Whether mixup or CutMix is on."""
        return self.mixup > 0 or self.cutmix > 0

    def check(self, config: TrainConfig) -> None:
        """Raise ConfigError unless batches can be mixed, and the model can learn from itself."""
        micro_batch_size = config.optimisation.micro_batch_size
        if self.mixes_images and micro_batch_size % 2:
            raise ConfigError(
                f"batch_size / accumulation_steps is {micro_batch_size}; it must be even, as mixup"
                " and CutMix mix images in pairs"
            )
        check_images(config)
        if config.data.naflex and self.mixes_images:
            raise ConfigError(
                f"mixup is {self.mixup} and cutmix {self.cutmix}; both must be 0 with naflex, as"
                " they mix images of one shape"
            )
        if self.self_distillation and not config.optimisation.ema_decay:
            raise ConfigError(
                f"self_distillation is {self.self_distillation}; it learns from the weights' moving"
                " average, ema_decay must be above 0"
            )
        if not self.self_distillation:
            refuse_unused(self, ["self_distillation_start"], "self_distillation is 0")

    def check_share(self, size: int) -> None:
        """Raise ConfigError unless one process can mix its share of a micro-batch."""
        if self.mixes_images and size % 2:
            raise ConfigError(
                f"each process has {size} items of a micro-batch; it must be an even share, as"
                " mixup and CutMix mix images in pairs"
            )

    def open(self, config: TrainConfig) -> Classification:
        """Open the images."""
        from vision_ttt.tasks.classification.task import Classification

        return Classification(config)

    @classmethod
    def rebuild(cls, metadata: ModelMetadata) -> nn.Module:
        """Build the classifier that a checkpoint describes."""
        from vision_ttt.tasks.images.models import rebuild

        return rebuild(metadata)

    @classmethod
    def reopen(
        cls, metadata: ModelMetadata, changes: Mapping[str, Any], **machine: Any
    ) -> Classification:
        """Open a checkpoint's images again; see `vision_ttt.tasks.images.task`."""
        from vision_ttt.tasks.images.task import reopen

        # How a classifier was trained does not matter to its evaluation.
        return reopen(cls(), metadata, changes, **machine)

    @classmethod
    def predictor(
        cls, model: nn.Module, metadata: ModelMetadata, *, topk: int | None, **options: Any
    ) -> ClassPredictor:
        """Return what predicts the classes of image files, 5 of each unless `topk` is given."""
        from vision_ttt.tasks.classification.predict import ClassPredictor

        return ClassPredictor(model, metadata, topk=5 if topk is None else topk, **options)
