"""Evaluation of a segmenter: intersections and unions per class, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_ttt.data.mask_folders import IGNORED
from vision_ttt.tasks.segmentation.logits import resized_bands


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
