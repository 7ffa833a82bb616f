"""The sections `task` and `data` of a run that trains a detector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from vision_ttt.engine.config import ConfigError, TrainConfig
from vision_ttt.engine.section import PROBABILITY, Range, Section, number
from vision_ttt.extras import require
from vision_ttt.tasks.dense.config import DenseSection

if TYPE_CHECKING:  # they need PyTorch
    from torch import nn

    from vision_ttt.engine.checkpoint import ModelMetadata
    from vision_ttt.tasks.detection.predict import ObjectPredictor
    from vision_ttt.tasks.detection.task import Detection

_SIDE = Range(32, 16_384, "from 32 to 16,384")


@dataclass(frozen=True)
class DetectionData(Section):
    """Images and COCO files of their objects, the images' sizes, and their augmentation."""

    root: str = "coco"
    """Folder of the data, below which the others are; they fit COCO 2017's layout."""
    train_images: str = "train2017"
    """Folder of the training images."""
    train_annotations: str = "annotations/instances_train2017.json"
    """COCO file of the objects in the training images."""
    test_images: str = "val2017"
    """Folder of the test images."""
    test_annotations: str = "annotations/instances_val2017.json"
    """COCO file of the objects in the test images."""
    shorter_side: int = number(800, _SIDE)
    """Shorter side in pixels that images are resized to; their proportions are kept."""
    shorter_side_least: int | None = number(None, _SIDE)
    """Training images are resized to a shorter side chosen at random, from this one to shorter_side
    in steps of 32; null: always to shorter_side."""
    longer_side: int = number(1333, _SIDE)
    """Most that the longer side may have in pixels; the shorter one then has less."""
    crop: bool = False
    """Crop a training image with probability one half, as DETR does. The window has sides of 384 to
    600 pixels at a scale where the image's shorter side has 400, 500 or 600 pixels; it is then
    resized like a whole image."""
    horizontal_flip: float = number(0.5, PROBABILITY)
    """Probability of a left-right flip (0 to 1)."""
    empty_images: Literal["keep", "skip"] = "skip"
    """Training images without an object to train on; test images are all kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        least = self.shorter_side if self.shorter_side_least is None else self.shorter_side_least
        for name, value, most in (
            ("shorter_side_least", least, self.shorter_side),
            ("shorter_side", self.shorter_side, self.longer_side),
        ):
            if value > most:
                above = "longer_side" if name == "shorter_side" else "shorter_side"
                raise ConfigError(f"{name} is {value}; it must be at most {above} ({most})")

    def folder(self, part: Literal["train", "test"]) -> Path:
        """Return the folder of images of a part."""
        return self._below(getattr(self, f"{part}_images"))

    def file(self, part: Literal["train", "test"]) -> Path:
        """Return the COCO file of a part."""
        return self._below(getattr(self, f"{part}_annotations"))

    def _below(self, path: str) -> Path:
        return Path(self.root).expanduser() / path


@dataclass(frozen=True)
class DetectionSection(DenseSection):
    """Detection and instance segmentation (Mask R-CNN)."""

    name: Literal["detection"] = "detection"
    """Name of the task."""

    DATA: ClassVar[type[DetectionData]] = DetectionData
    HOLDS: ClassVar[str] = "a detector (for vision-ttt eval and predict)"

    def open(self, config: TrainConfig) -> Detection:
        """Read both COCO files."""
        require("dense", "detection")
        from vision_ttt.data.coco_reading import read_coco
        from vision_ttt.tasks.detection.task import Detection

        data = config.data
        return Detection(config, read_coco(data.file("test")), read_coco(data.file("train")))

    @classmethod
    def rebuild(cls, metadata: ModelMetadata) -> nn.Module:
        """Build the detector that a checkpoint describes."""
        require("dense", "detection")
        from vision_ttt.tasks.detection.task import rebuild

        return rebuild(metadata)

    @classmethod
    def reopen(
        cls, metadata: ModelMetadata, changes: Mapping[str, Any], *, part: str, **machine: Any
    ) -> Detection:
        """Read the COCO file of a part of a checkpoint's data, or of another folder's.

        Args:
            changes: `dataset`, a folder that takes the place of `root`.
            part: "test" or "train"; not "all", as two files may give one id to two images.
        """
        require("dense", "detection")
        from vision_ttt.tasks.detection.task import reopen

        # How a detector was trained does not matter to its evaluation.
        return reopen(cls(), metadata, changes, part=part, **machine)

    @classmethod
    def predictor(
        cls, model: nn.Module, metadata: ModelMetadata, **options: Any
    ) -> ObjectPredictor:
        """Return what finds objects in image files."""
        require("dense", "detection")
        from vision_ttt.tasks.detection.predict import ObjectPredictor

        return ObjectPredictor(model, metadata, **options)
