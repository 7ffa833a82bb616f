"""Evaluation of a classifier: loss, accuracy, confusion matrix, and every prediction."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class ClassifierEvaluation:
    """What a model says about a dataset of N images in C classes."""

    loss: float
    """Mean cross-entropy in nats."""
    accuracy: float
    """Share of images whose most probable class is theirs, from 0 to 1."""
    top5_accuracy: float
    """Share of images whose class is among the five most probable, from 0 to 1."""
    targets: Tensor
    """True class indices [N], in the dataset's order, damaged images left out."""
    predictions: Tensor
    """Most probable class indices [N]."""
    probabilities: Tensor
    """Class probabilities [N, C] float32."""
    confusion: Tensor
    """Counts [C, C]: row = true class, column = predicted class."""

    @property
    def metrics(self) -> dict[str, float]:
        """Loss and accuracy."""
        return {"loss": self.loss, "accuracy": self.accuracy}


def summarise(logits: Tensor, targets: Tensor) -> ClassifierEvaluation:
    """Return the evaluation of logits [N, C] against class indices [N]."""
    count, classes = logits.shape
    predictions = logits.argmax(dim=1)
    top = logits.topk(min(5, classes), dim=1).indices
    pairs = targets * classes + predictions
    return ClassifierEvaluation(
        loss=F.cross_entropy(logits, targets).item(),
        accuracy=(predictions == targets).sum().item() / count,
        top5_accuracy=(top == targets[:, None]).any(dim=1).sum().item() / count,
        targets=targets,
        predictions=predictions,
        probabilities=logits.softmax(dim=1),
        confusion=torch.bincount(pairs, minlength=classes**2).reshape(classes, classes),
    )
