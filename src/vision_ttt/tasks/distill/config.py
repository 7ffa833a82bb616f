"""The section `task` of a run that distils a teacher into a student."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from vision_ttt.engine.config import ConfigError, TaskSection, TrainConfig
from vision_ttt.engine.described import check_whole_numbers
from vision_ttt.engine.section import POSITIVE, SHARE, Range, number, refuse_unused
from vision_ttt.errors import UserError
from vision_ttt.tasks.images.config import ImageData, check_images

if TYPE_CHECKING:  # they need PyTorch
    from torch import nn

    from vision_ttt.engine.checkpoint import ModelMetadata
    from vision_ttt.tasks.classification.predict import ClassPredictor
    from vision_ttt.tasks.distill.task import Distill

_OF_LOGITS = ("temperature", "label_weight")


@dataclass(frozen=True)
class DistillSection(TaskSection):
    """Distillation of a teacher's features or logits into the model, without labels."""

    name: Literal["distill"] = "distill"
    """Name of the task."""
    teacher: str | None = None
    """Name of the teacher: a model of timm or of this package, or packaged weights, MODEL.TAG."""
    teacher_weights: str | None = None
    """Path of a .safetensors file of the teacher's weights, with timm's names or a checkpoint of
    this package; null: the weights that timm has under the teacher's name."""
    teacher_arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Constructor arguments of the teacher, e.g. --teacher-arguments.img_size 32."""
    teacher_size: int | None = number(None, Range(1, 16_384, "from 1 to 16,384"))
    """Height and width in pixels of the images that the teacher sees, resized from the student's;
    null: img_size of teacher_arguments, or those that the teacher's description names."""
    match: Literal["tokens", "layers", "pooled", "logits"] = "tokens"
    """What the student learns. tokens: the teacher's last map of features, token by token. layers:
    the tokens after every block; both models must have the same depth. pooled: the feature before
    the teacher's head. logits: the class probabilities; the teacher must have the dataset's
    classes."""
    feature_loss: Literal["smooth_l1", "cosine"] = "smooth_l1"
    """Distance of features: smooth L1 of features of mean 0 and variance 1, or 1 minus the
    cosine."""
    temperature: float = number(1.0, POSITIVE)
    """Divisor of both models' logits; gradients are multiplied by its square."""
    label_weight: float = number(0.0, SHARE)
    """Share of the cross-entropy against the labels in the loss of logits (0 to <1); 0: no label
    is used."""

    DATA: ClassVar[type[ImageData]] = ImageData
    HOLDS: ClassVar[str] = (
        "a distilled student (for vision-ttt eval, and for other tasks by --initial-weights)"
    )

    def check(self, config: TrainConfig) -> None:
        """Raise ConfigError unless there is a teacher, and no field would be ignored."""
        check_images(config)
        if self.teacher is None:
            raise ConfigError("teacher is null; it must name a model, e.g. deit_tiny_patch16_224")
        unused = ("feature_loss",) if self.match == "logits" else _OF_LOGITS
        refuse_unused(self, unused, f"match is {self.match!r}, which does not use it")

    def open(self, config: TrainConfig) -> Distill:
        """Open the images and load the teacher."""
        from vision_ttt.tasks.distill.task import Distill

        return Distill(config)

    @classmethod
    def stands_for(cls, metadata: ModelMetadata) -> tuple[str, ...]:
        """A student of logits is a classifier."""
        return ("classification",) if metadata.task.get("match") == "logits" else ()

    @classmethod
    def rebuild(cls, metadata: ModelMetadata) -> nn.Module:
        """Build the student that a checkpoint describes; the teacher is not needed."""
        from vision_ttt.tasks.distill.model import build_student
        from vision_ttt.tasks.images.models import rebuild

        match, widths = cls(**metadata.task).match, metadata.carried["widths"]
        check_whole_numbers("widths", widths, len(widths))
        return rebuild(metadata, partial(build_student, match=match, widths=widths))

    @classmethod
    def reopen(cls, metadata: ModelMetadata, changes: Mapping[str, Any], **machine: Any) -> Distill:
        """Open a checkpoint's images and teacher again; see `vision_ttt.tasks.images.task`."""
        from vision_ttt.tasks.images.task import reopen

        return reopen(cls(**metadata.task), metadata, changes, **machine)

    @classmethod
    def predictor(
        cls, model: nn.Module, metadata: ModelMetadata, *, topk: int | None, **options: Any
    ) -> ClassPredictor:
        """Return what predicts the classes of image files with a student of logits.

        Raises:
            UserError: the student has learnt features.
        """
        if not cls.stands_for(metadata):
            raise UserError(f"the checkpoint holds {cls.HOLDS}; it predicts nothing for files")
        from vision_ttt.tasks.classification.config import ClassificationSection

        return ClassificationSection.predictor(model, metadata, topk=topk, **options)
