"""Curves and reconstructions of a run on masked images."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from PIL import Image
from torchvision.transforms.functional import to_pil_image

from vision_ttt.engine.checkpoint import WEIGHTS_FILE
from vision_ttt.engine.task import Report
from vision_ttt.engine.train import TrainResult
from vision_ttt.explain.report import Picture
from vision_ttt.tasks.figures import Curves, learning_curves, save, section
from vision_ttt.tasks.images.models import denormalise
from vision_ttt.tasks.images.pictures import as_png, picture_rows
from vision_ttt.tasks.masked_images.model import from_patches, standardised, to_patches

if TYPE_CHECKING:
    from vision_ttt.tasks.masked_images.task import MaskedImages

_SHOWN, _SHOWN_WIDTH = 8, 120  # images, and the pixels that small ones are magnified to at least
_GREY = 0.5


def write_report(task: MaskedImages, result: TrainResult) -> Report:
    """Write curves.png and reconstructions.png into the run directory; return the page's."""
    history, evaluation = result.metrics["history"], result.evaluation
    lines = {"train_loss": "training", "test_loss": "test", "test_constant_loss": "constant"}
    panel = Curves("Error of masked patches", "mean absolute, standardised", lines)
    sections = {
        "curves": section(
            "Training",
            "The error at each evaluation; constant: of a prediction of each patch's mean.",
            learning_curves,
            *(history, [panel]),
        ),
        "reconstructions": Picture(
            "Reconstructions",
            "Test images, not selected: as they are, as the model sees them, and with its"
            " prediction in the masked patches. It predicts patches of mean 0 and variance 1; here"
            " they have the mean and the variance of the true ones.",
            as_png(_reconstructions(task, result)),
        ),
    }
    loss = history[-1]["train_loss"]  # None where every update was skipped
    measured = {
        "train loss": "-" if loss is None else f"{loss:.4f}",
        "test loss": f"{evaluation.loss:.4f}",
        "test loss of constant patches": f"{evaluation.constant_loss:.4f}",
    }
    weights = result.run_dir / WEIGHTS_FILE
    next_command = ("train", "RECIPE", "--initial-weights", str(weights))
    pictures = {"reconstructions": result.run_dir / "reconstructions.png"}
    return Report(save(sections, result.run_dir), measured, pictures, next_command)


def _reconstructions(task: MaskedImages, result: TrainResult) -> Image.Image:
    images = task.watched()[:_SHOWN]
    masks = task.masks(images, [(index,) for index in range(len(images))])
    device = next(result.model.parameters()).device
    with torch.no_grad():
        predicted = result.model(images.to(device), masks.to(device)).float().cpu()
    size = task.patch_size
    patches = to_patches(images, size)
    _, mean, deviation = standardised(patches)
    masked = masks.unsqueeze(-1)
    filled = torch.where(masked, predicted * deviation + mean, patches)
    grid = tuple(length // side for length, side in zip(images.shape[-2:], size, strict=True))
    shown = [denormalise(from_patches(x, size, grid), task.input) for x in (patches, filled)]
    hidden = from_patches(masked.expand_as(patches).float(), size, grid)
    seen = torch.where(hidden > 0, _GREY, shown[0])
    rows = zip(shown[0], seen, shown[1], strict=True)
    return picture_rows(
        [[_magnified(to_pil_image(image)) for image in row] for row in rows],
        ["image", "masked", "filled in"],
    )


def _magnified(picture: Image.Image) -> Image.Image:
    zoom = max(1, -(-_SHOWN_WIDTH // picture.width))
    return picture.resize((zoom * picture.width, zoom * picture.height), Image.Resampling.NEAREST)
