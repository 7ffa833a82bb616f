"""Evaluation of a segmenter: intersections and unions per class, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from vision_ttt.data import DatasetError
from vision_ttt.data.mask_folders import IGNORED
from vision_ttt.engine.damaged import DamagedItems
from vision_ttt.engine.evaluation import rows_of_items
from vision_ttt.engine.task import Batch
from vision_ttt.errors import DamagedModel
from vision_ttt.tasks.segmentation.logits import resized_bands

Segment = Callable[[Tensor], Tensor]
"""From an image [3, h, w] to its logits [C, h, w]."""


@dataclass(frozen=True)
class SegmentationEvaluation:
    """What a model says about the pixels of N images, those without a class left out."""

    intersections: Tensor
    """Per class the pixels [C] int64 that are of it and predicted so."""
    predicted: Tensor
    """Per class the pixels [C] int64 that are predicted to be of it."""
    true: Tensor
    """Per class the pixels [C] int64 that are of it."""
    loss: float
    """Mean cross-entropy of a pixel in nats."""
    images: int
    """N."""

    @cached_property
    def iou(self) -> Tensor:
        """Intersection over union [C] float64; NaN for classes neither true nor predicted."""
        return self.intersections.double() / (self.predicted + self.true - self.intersections)

    @cached_property
    def accuracy(self) -> Tensor:
        """Share of a class's pixels that are predicted so [C] float64; NaN where it has none."""
        return self.intersections.double() / self.true

    @property
    def metrics(self) -> dict[str, float]:
        """The loss, and means over the classes that occur and over all pixels.

        `miou` is over the classes that are true or predicted anywhere, `mean_accuracy` over those
        that are true; `pixel_accuracy` is the share of all pixels whose class is predicted.
        """
        return {
            "miou": self.iou.nanmean().item(),
            "mean_accuracy": self.accuracy.nanmean().item(),
            "pixel_accuracy": (self.intersections.sum().double() / self.true.sum()).item(),
            "loss": self.loss,
        }


def evaluate(
    segment: Segment,
    model: nn.Module,
    loader: DataLoader,
    accelerator: Accelerator,
    *,
    num_classes: int,
    damaged: DamagedItems,
    between: Callable[[], None] = lambda: None,
) -> SegmentationEvaluation:
    """Run `segment` over `loader`, which holds this process's images.

    Every process gets the evaluation of all images, each of which counts once. Logits are resized
    to the masks' own sizes. `between` is called before each batch; what it raises ends the
    evaluation.

    Args:
        segment: an image's logits by `model`, which is in evaluation mode meanwhile.
        num_classes: C.

    Raises:
        DamagedItem: an image or mask cannot be read and is not to be skipped.
        DatasetError: there is no image, or no pixel with a class.
        DamagedModel: the loss is not finite: the classes of such logits mean nothing.
    """

    def measure(batch: Batch) -> dict[str, Tensor]:
        each = [
            measured(segment(image), labels)
            for image, labels in zip(batch["images"], batch["labels"], strict=True)
        ]
        if not each:
            return {
                "counts": torch.zeros(0, 3, num_classes, dtype=torch.int64),
                "loss": torch.zeros(0, dtype=torch.float64),
            }
        counts, losses = zip(*each, strict=True)
        return {"counts": torch.stack(counts), "loss": torch.stack(losses)}

    rows = rows_of_items(measure, model, loader, accelerator, damaged=damaged, between=between)
    intersections, predicted, true = rows["counts"].sum(dim=0)
    pixels = int(true.sum())
    if not pixels:
        raise DatasetError(f"no pixel of the {len(rows['loss'])} test images has a class")
    loss = rows["loss"].sum().item() / pixels
    if not math.isfinite(loss):
        raise DamagedModel(
            f"the model's loss is {loss}: its weights are damaged, or it has diverged"
        )
    return SegmentationEvaluation(intersections, predicted, true, loss, len(rows["loss"]))


def measured(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Compare logits [C, h, w] with labels [H, W], of the pixels that have a class.

    Returns:
        Per class the pixels that are of it and predicted so, that are predicted so, and that are
        of it [3, C] int64; the summed cross-entropy [] float64 in nats. Both on the CPU.
    """
    classes = len(logits)
    counts = torch.zeros(3, classes, dtype=torch.int64)
    loss = torch.zeros((), dtype=torch.float64)
    for rows, band in resized_bands(logits, tuple(labels.shape)):
        true = labels[rows].long()
        loss += (
            F.cross_entropy(band[None], true[None], ignore_index=IGNORED, reduction="none")
            .sum(dtype=torch.float64)
            .cpu()
        )
        has_class = true != IGNORED
        true, predicted = true[has_class], band.argmax(dim=0)[has_class]
        for place, chosen in enumerate((true[true == predicted], predicted, true)):
            counts[place] += torch.bincount(chosen, minlength=classes).cpu()
    return counts, loss
