"""The sections `task` and `data` of a run that trains a segmenter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from vision_ttt.engine.config import ConfigError, TrainConfig
from vision_ttt.engine.section import (
    FRACTION,
    NOT_NEGATIVE,
    PROBABILITY,
    Range,
    Section,
    number,
)
from vision_ttt.extras import require
from vision_ttt.tasks.dense.config import DenseSection

if TYPE_CHECKING:  # they need PyTorch
    from torch import nn
    from torch.utils.data import Dataset

    from vision_ttt.engine.checkpoint import ModelMetadata
    from vision_ttt.tasks.segmentation.predict import SegmentPredictor
    from vision_ttt.tasks.segmentation.task import Segmentation

LARGEST_SIDE = 16_384
"""Pixels; more is a typing error."""
_SIDE = Range(32, LARGEST_SIDE, f"from 32 to {LARGEST_SIDE:,}")
_STRIDE = Range(1, LARGEST_SIDE, f"from 1 to {LARGEST_SIDE:,}")
_SCALE = Range(0.01, 100.0, "from 0.01 to 100")


class LabelledSet(NamedTuple):
    """A set of images with their masks, in two parts."""

    classes: tuple[str, ...]
    """Names of the labels, from 0, all different."""
    train: Dataset
    """Its items are :class:`vision_ttt.data.mask_folders.LabelledImage`."""
    test: Dataset


ROOTS: dict[str, Callable[[Mapping[str, Any]], LabelledSet]] = {}
"""Root → what opens the set that it stands for, given the run's `root_options`."""


def register_root(name: str, open_set: Callable[[Mapping[str, Any]], LabelledSet]) -> None:
    """Let a root stand for the images and masks of another package, in place of a folder.

    Args:
        name: the value of the field `root`. A folder of that name is `./NAME`.
        open_set: a function of the field `root_options`. It raises
            :class:`vision_ttt.data.DatasetError` for an option that it does not accept. Recipes are
            read without PyTorch: import the set's module inside the function.

    Raises:
        ValueError: another set has the name.
    """
    if ROOTS.setdefault(name, open_set) is not open_set:
        raise ValueError(f"there is a set of images and masks {name!r} already")


@dataclass(frozen=True)
class SegmentationData(Section):
    """Folders of images and of masks, and what is done to them; by default ADE20K's."""

    root: str = "ADEChallengeData2016"
    """Folder of the dataset, which the others lie in; or the name of a set that another package
    registers."""
    root_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the registered set accepts, e.g. --root-options.side 512; a folder has no options."""
    train_images: str = "images/training"
    """Folder of the training images, in root."""
    train_masks: str = "annotations/training"
    """Folder of their masks, in root: a single-channel .png for each image, of the same name; a
    pixel's value is its label, 255 stands for no class."""
    test_images: str = "images/validation"
    """Folder of the test images, in root."""
    test_masks: str = "annotations/validation"
    """Folder of their masks, in root."""
    classes: str | None = None
    """File of class names, in root: one per line, or a table divided by tabs with a column Name;
    null: objectInfo150.txt or classes.txt."""
    zero_is_unlabelled: bool = True
    """Whether label 0 stands for no class, and 1 for the first one, as in ADE20K; otherwise 0
    stands for the first one."""
    crop_size: int = number(512, _SIDE)
    """Height and width of the training crops in pixels; smaller images are padded."""
    longer_side: int = number(2048, _SIDE)
    """Most pixels of an image's longer side after resizing, in training before scaling."""
    shorter_side: int = number(512, _SIDE)
    """Pixels of a training image's shorter side after resizing, before scaling, unless the longer
    one would be too long."""
    scale_min: float = number(0.5, _SCALE)
    """Least factor of the random scaling of training images."""
    scale_max: float = number(2.0, _SCALE)
    """Largest factor of the random scaling of training images."""
    largest_class_share: float = number(0.75, FRACTION)
    """A crop in which one class has this share of the labelled pixels or more (>0 to 1) is drawn
    again; the tenth draw is used in any case. 1: any crop."""
    horizontal_flip: float = number(0.5, PROBABILITY)
    """Probability of a left-right flip (0 to 1)."""
    photometric_distortion: float = number(0.5, PROBABILITY)
    """Probability that brightness is changed, and likewise contrast, saturation and hue (0 to
    1)."""
    evaluation: Literal["whole", "slide"] = "whole"
    """What the model sees at test: the whole image, or windows, whose logits are averaged where
    they overlap."""
    window: int = number(512, _SIDE)
    """Height and width of the windows in pixels; smaller images are padded."""
    stride: int = number(341, _STRIDE)
    """Pixels from one window to the next."""
    test_shorter_side: int = number(512, _SIDE)
    """Pixels of a test image's shorter side after resizing, unless the longer one would be too
    long. Predictions are compared with the masks at these masks' own size."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.root_options and self.root not in ROOTS:
            raise ConfigError(
                f"root_options is given, but root {self.root!r} is no registered set; registered"
                f" are: {', '.join(ROOTS) or 'none'}"
            )
        for low, high in (
            ("scale_min", "scale_max"),
            ("stride", "window"),
            ("shorter_side", "longer_side"),
            ("test_shorter_side", "longer_side"),
        ):
            if getattr(self, low) > getattr(self, high):
                raise ConfigError(
                    f"{low} is {getattr(self, low)}; it must be at most {high}"
                    f" ({getattr(self, high)})"
                )


@dataclass(frozen=True)
class SegmentationSection(DenseSection):
    """Semantic segmentation: each pixel's class, by cross-entropy."""

    name: Literal["segmentation"] = "segmentation"
    """Name of the task."""
    maps: Literal["adapter", "pyramid", "stages", "tokens"] = "adapter"
    """Where the maps come from: at strides 4 to 32 a ViT-Adapter around a plain backbone, whose
    blocks have one resolution, a pyramid resampled from four of its depths, or the stages of a
    hierarchical one, for a UperNet; or the tokens of a plain backbone as they are, for one linear
    layer."""
    auxiliary_weight: float = number(0.4, NOT_NEGATIVE)
    """Weight of the auxiliary head's cross-entropy in the loss (>= 0); a linear layer has none."""

    DATA: ClassVar[type[SegmentationData]] = SegmentationData
    HOLDS: ClassVar[str] = "a segmenter (for vision-ttt eval and predict)"

    def check(self, config: TrainConfig) -> None:
        """Raise ConfigError unless the run can evaluate, and its batches fit the batch norms."""
        self.check_share(config.optimisation.micro_batch_size)
        if config.machine.sharding == "sharded" and config.data.evaluation == "slide":
            raise ConfigError(
                "evaluation is 'slide', but sharding is 'sharded', whose processes must make the"
                " same number of passes; it must be 'whole', or sharding 'replicated'"
            )

    def check_share(self, size: int) -> None:
        """Raise ConfigError unless one process has images enough for the heads' batch norms."""
        if size < 2 and self.maps != "tokens":
            raise ConfigError(
                f"batch_size / accumulation_steps / processes is {size}; it must be at least 2, as"
                " the heads' batch norms may see a single pixel of each image"
            )

    def open(self, config: TrainConfig) -> Segmentation:
        """Open the images and masks."""
        from vision_ttt.tasks.segmentation.task import Segmentation

        return Segmentation(config)

    @classmethod
    def rebuild(cls, metadata: ModelMetadata) -> nn.Module:
        """Build the segmenter that a checkpoint describes."""
        from vision_ttt.tasks.segmentation.task import rebuild

        return rebuild(metadata)

    @classmethod
    def reopen(
        cls, metadata: ModelMetadata, changes: Mapping[str, Any], **machine: Any
    ) -> Segmentation:
        """Open a checkpoint's images and masks again, or other ones.

        Args:
            changes: fields of `SegmentationData`; `dataset` stands for another root, of which the
                folders have the same names.
        """
        from vision_ttt.tasks.segmentation.task import reopen

        return reopen(cls(), metadata, changes, **machine)

    @classmethod
    def predictor(
        cls, model: nn.Module, metadata: ModelMetadata, **options: Any
    ) -> SegmentPredictor:
        """Return what predicts the classes of the pixels of image files."""
        require("dense", "segmentation")
        from vision_ttt.tasks.segmentation.predict import SegmentPredictor

        return SegmentPredictor(model, metadata, **options)
