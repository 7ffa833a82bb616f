"""Evaluation of a classifier: loss, accuracy, confusion matrix, and every prediction.

`rows_of_images` measures other models, too.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from vision_ttt.data import DatasetError, ImageError, watched
from vision_ttt.data.loading import Batch
from vision_ttt.engine.parallel import together

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
    between: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Run `model` (in evaluation mode) over `loader`, which holds this process's images.

    Every process gets the evaluation of all images, each of which counts once, in the dataset's
    order. `between` is called before each batch; what it raises ends the evaluation.

    Raises:
        ImageError: an image does not decode and is not to be skipped.
        DatasetError: there is no image.
    """

    def logits(images: Tensor, _targets: Tensor, _indices: Tensor) -> Tensor:
        with autocast(accelerator.device, precision):
            return model(at_least_one(images))[: len(images)]

    return summarise(
        *rows_of_images(logits, model, loader, accelerator, bad_images=bad_images, between=between)
    )


def rows_of_images(
    measure: Callable[[Tensor, Tensor, Tensor], Tensor],
    model: nn.Module,
    loader: DataLoader,
    accelerator: Accelerator,
    *,
    bad_images: BadImages,
    between: Callable[[], None] = lambda: None,
) -> tuple[Tensor, Tensor]:
    """Measure each image that `loader` and those of the other processes hold.

    Args:
        measure: (images [B, 3, H, W], targets [B] and indices [B], all on the device) → a row for
            each image; called for batches without an image, too.
        model: set to evaluation mode meanwhile.
        between: called before each batch; what it raises ends the evaluation.

    Returns:
        Rows [N, …] in float32 and targets [N], on the CPU, each image once, in the dataset's order.

    Raises:
        ImageError: an image does not decode and is not to be skipped.
        DatasetError: there is no image.
    """
    was_training = model.training
    model.eval()
    rows: dict[str, list[Tensor]] = {"measured": [], "targets": [], "indices": []}
    try:
        with torch.inference_mode():
            for batch in watched(loader):
                between()
                bad_images.check(batch)
                given = [
                    batch[name].to(accelerator.device, non_blocking=True)
                    for name in ("images", "targets", "indices")
                ]
                rows["measured"].append(measure(*given).float().cpu())
                rows["targets"].append(batch["targets"])
                rows["indices"].append(batch["indices"])
    finally:
        model.train(was_training)
    if not rows["indices"]:
        raise DatasetError("the test set has no images")
    every = together({name: torch.cat(parts) for name, parts in rows.items()}, accelerator)
    indices, first = unique_rows(every["indices"])
    if not len(indices):
        raise DatasetError("the test set has no images")
    return every["measured"][first].clone(), every["targets"][first].clone()


def unique_rows(indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the different indices [N] in order, and for each where it comes first."""
    ordered, places = torch.sort(indices, stable=True)
    fresh = torch.ones_like(ordered, dtype=torch.bool)
    fresh[1:] = ordered[1:] != ordered[:-1]
    return ordered[fresh], places[fresh]


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


def at_least_one(images: Tensor) -> Tensor:
    """Return the images [B, …], or an empty one.

    Several processes wait for each other's gradients, and for the parts of a sharded model.
    """
    return images if len(images) else images.new_zeros(1, *images.shape[1:])


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the context in which forward passes run in `precision`."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16")
