"""Evaluation of a classifier: loss, accuracy, confusion matrix, and every prediction."""

import logging
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from vision_ttt.data import DatasetError, ImageError
from vision_ttt.data.loading import Batch

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluation:
    """What a model says about a dataset of N images in C classes."""

    loss: float
    """Mean cross-entropy in nats."""
    accuracy: float
    """Share of images whose most probable class is theirs, from 0 to 1."""
    top5_accuracy: float
    """Share of images whose class is among the five most probable, from 0 to 1."""
    targets: Tensor
    """True class indices [N], in the dataset's order, bad images left out."""
    predictions: Tensor
    """Most probable class indices [N]."""
    probabilities: Tensor
    """Class probabilities [N, C] float32."""
    confusion: Tensor
    """Counts [C, C]: row = true class, column = predicted class."""

    @property
    def class_accuracy(self) -> Tensor:
        """Accuracy of each class [C]; NaN where the dataset has no image of it."""
        return self.confusion.diagonal() / self.confusion.sum(dim=1)


class BadImages:
    """Names the images that did not decode: stops at the first, or counts them and goes on."""

    def __init__(self, skip: bool, names: list[str] | None = None) -> None:
        self.skip = skip
        self.names = [] if names is None else names

    def check(self, batch: Batch) -> None:
        """Take note of `batch`'s bad images.

        Raises:
            ImageError: there is one, and it is not to be skipped.
        """
        for name, reason in batch["bad"]:
            if not self.skip:
                raise ImageError(name, reason)
            if name not in self.names:
                self.names.append(name)
                _LOGGER.warning("skipped image %s: %s", name, reason)


def evaluate(
    model: nn.Module,
    loader: DataLoader,
    accelerator: Accelerator,
    *,
    bad_images: BadImages,
    precision: str = "float32",
) -> Evaluation:
    """Run `model` (in evaluation mode) over `loader`, which `accelerator` has prepared.

    Raises:
        ImageError: an image does not decode and is not to be skipped.
        DatasetError: there is no image.
    """
    was_training = model.training
    model.eval()
    all_logits, all_targets = [], []
    with torch.inference_mode():
        for batch in loader:
            bad_images.check(batch)
            if not len(batch["targets"]):  # all of them bad
                continue
            with autocast(accelerator.device, precision):
                logits = model(batch["images"])
            logits, targets = accelerator.gather_for_metrics((logits.float(), batch["targets"]))
            all_logits.append(logits.cpu())
            all_targets.append(targets.cpu())
    model.train(was_training)
    if not all_targets:
        raise DatasetError("the test set has no images")
    return summarise(torch.cat(all_logits).clone(), torch.cat(all_targets).clone())


def summarise(logits: Tensor, targets: Tensor) -> Evaluation:
    """Return the evaluation of logits [N, C] against class indices [N]."""
    count, classes = logits.shape
    predictions = logits.argmax(dim=1)
    top = logits.topk(min(5, classes), dim=1).indices
    pairs = targets * classes + predictions
    return Evaluation(
        loss=F.cross_entropy(logits, targets).item(),
        accuracy=(predictions == targets).sum().item() / count,
        top5_accuracy=(top == targets[:, None]).any(dim=1).sum().item() / count,
        targets=targets,
        predictions=predictions,
        probabilities=logits.softmax(dim=1),
        confusion=torch.bincount(pairs, minlength=classes**2).reshape(classes, classes),
    )


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the context in which forward passes run in `precision`."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16")
