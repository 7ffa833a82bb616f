"""Figures of a segmenter's training run, written into its directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from vision_ttt.data.mask_folders import IGNORED
from vision_ttt.engine.checkpoint import BEST_FILE
from vision_ttt.engine.csv_text import csv_text
from vision_ttt.engine.task import Report
from vision_ttt.engine.train import TrainResult
from vision_ttt.errors import DamagedItem
from vision_ttt.explain.report import Picture
from vision_ttt.files import write_text
from vision_ttt.tasks.figures import Curves, class_bars, learning_curves, save, section
from vision_ttt.tasks.images.pictures import as_png, picture_rows, with_legend
from vision_ttt.tasks.segmentation.logits import predicted_labels
from vision_ttt.tasks.segmentation.pictures import overlaid

if TYPE_CHECKING:
    from vision_ttt.tasks.segmentation.task import Segmentation

_SHOWN_IMAGES = 6
_PICTURE_SIDE = 320  # pixels of a picture's longer side on the sheet


def write_report(task: Segmentation, result: TrainResult) -> Report:
    """Write curves.png, iou.png, iou.csv and overlays.png; return what the page shows."""
    metrics = result.metrics
    losses = {"train_loss": "training", "test_loss": "test"}
    shares = {"test_miou": "mean IoU", "test_pixel_accuracy": "pixel accuracy"}
    panels = [
        Curves("Cross-entropy", "nats per pixel", losses),
        Curves(f"Mean IoU: {metrics['test_miou']:.1%}", "%", shares, 100),
    ]
    sections = {
        "curves": section(
            "Training",
            "Cross-entropy per pixel and mean IoU at each evaluation. The training loss has the "
            "auxiliary head's part, and counts pixels without a class as 0.",
            learning_curves,
            *(metrics["history"], panels),
        ),
        "iou": section(
            "Intersection over union by class",
            "The best first. Classes that are neither true nor predicted anywhere in the test "
            "images have none, and are left out of the mean.",
            class_bars,
            *(task.classes, {"IoU": result.evaluation.iou.tolist()}, "IoU, %"),
        ),
    }
    sheet = _overlay_sheet(task, result)
    if sheet is not None:
        sections["overlays"] = Picture(
            "Test images",
            "Image, truth and prediction; evenly spaced in the test data, not selected. Pixels "
            "without a class are not coloured in the truth.",
            as_png(sheet),
        )
    table = result.run_dir / "iou.csv"
    rows = task.figures(result.evaluation)["classes"]
    write_text(table, csv_text(list(rows[0]), rows))
    measured = {
        "test mean IoU": f"{metrics['test_miou']:.2%}",
        "best test mean IoU": f"{metrics['best_test_miou']:.2%}",
        "test pixel accuracy": f"{metrics['test_pixel_accuracy']:.2%}",
        "test loss": f"{metrics['test_loss']:.4f} nats per pixel",
    }
    best = result.run_dir / BEST_FILE
    next_command = ("predict", "FILES", "--checkpoint", str(best), "--pictures", "FOLDER")
    shown = save(sections, result.run_dir)
    return Report(shown, measured, {"IoU by class": table}, next_command)


def _overlay_sheet(task: Segmentation, result: TrainResult) -> Image.Image | None:
    """Some test images, evenly spaced, each with its truth and prediction; None if all are damaged.

    Small images are magnified so that their pixels are seen.
    """
    items, colours = task.test_set.items, task.palette
    device = next(result.model.parameters()).device
    segment = task.view.segment(result.model, len(task.classes), task.precision)
    rows: list[list[Image.Image]] = []
    seen: set[int] = set()
    for place in np.linspace(0, len(items) - 1, min(_SHOWN_IMAGES, len(items))).astype(int):
        try:
            item = items[int(place)]
        except DamagedItem:  # the evaluation has named it, or the run would have stopped
            continue
        image, labels = item
        logits = segment(task.test_set.transform(item, int(place)).image.to(device))
        predicted = predicted_labels(logits, labels.shape).cpu().numpy().astype(np.uint8)
        seen |= {*np.unique(labels).tolist(), *np.unique(predicted).tolist()}
        factor = _PICTURE_SIDE / max(image.size)
        size = tuple(max(round(side * factor), 1) for side in image.size)
        how = Image.Resampling.NEAREST if factor > 1 else Image.Resampling.LANCZOS
        row = [image, overlaid(image, labels, colours), overlaid(image, predicted, colours)]
        rows.append([picture.resize(size, how) for picture in row])
    if not rows:
        return None
    entries = [(task.classes[place], colours[place]) for place in sorted(seen - {IGNORED})]
    return with_legend(picture_rows(rows, ("image", "truth", "prediction")), entries)
