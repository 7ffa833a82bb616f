"""Figures of a segmenter's training run, written into its directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont
from matplotlib.ticker import MaxNLocator
from PIL import Image, ImageDraw, ImageFont

from vision_ttt.data.mask_folders import IGNORED, LabelledImage
from vision_ttt.engine.csv_text import csv_text
from vision_ttt.engine.task import Report
from vision_ttt.engine.train import TrainResult
from vision_ttt.errors import DamagedItem
from vision_ttt.explain.report import Section
from vision_ttt.files import write_bytes, write_text
from vision_ttt.tasks.images.pictures import as_figure, as_png, with_legend
from vision_ttt.tasks.segmentation.evaluation import SegmentationEvaluation
from vision_ttt.tasks.segmentation.pictures import overlaid
from vision_ttt.tasks.segmentation.resized_logits import predicted_labels

if TYPE_CHECKING:
    from vision_ttt.tasks.segmentation.task import Segmentation

_SHOWN_IMAGES = 6
_PICTURE_SIDE = 320  # pixels of a picture's longer side on the sheet, at least about
_BARS = 50  # in a column
_GAP = 6  # pixels between pictures
_HEADING = 24  # pixels of height


def write_report(task: Segmentation, result: TrainResult) -> Report:
    """Write curves.png, iou.png, iou.csv and overlays.png; return what the page shows."""
    history, evaluation = result.metrics["history"], result.evaluation
    sections = {
        "curves": Section(
            "Training",
            "Cross-entropy per pixel and mean IoU at each evaluation. The training loss has the "
            "auxiliary head's part, and counts pixels without a class as 0.",
            learning_curves(history),
            learning_curves(history, narrow=True),
        ),
        "iou": Section(
            "Intersection over union by class",
            "The best first. Classes that are neither true nor predicted anywhere in the test "
            "images have none, and are left out of the mean.",
            class_bars(evaluation, task.classes),
            class_bars(evaluation, task.classes, narrow=True),
        ),
    }
    triples = _predicted_images(task, result)
    if triples:
        sheet = overlay_sheet(triples, task.classes, task.palette)
        first = overlay_sheet(triples[:3], task.classes, task.palette)
        sections["overlays"] = Section(
            "Test images",
            "Image, truth and prediction; evenly spaced in the test data, not selected. Pixels "
            "without a class are not coloured in the truth.",
            as_figure(sheet),
            as_figure(first),
        )
    for name, section in sections.items():
        content = section.png if name != "overlays" else as_png(sheet)
        write_bytes(result.run_dir / f"{name}.png", content)
    table = result.run_dir / "iou.csv"
    write_text(table, _csv(task, evaluation))
    metrics = result.metrics
    measured = {
        "test mean IoU": f"{metrics['test_miou']:.2%}",
        "best test mean IoU": f"{metrics['best_test_miou']:.2%}",
        "test pixel accuracy": f"{metrics['test_pixel_accuracy']:.2%}",
        "test loss": f"{metrics['test_loss']:.4f} nats per pixel",
    }
    return Report(list(sections.values()), measured, {"IoU by class": table})


def learning_curves(history: Sequence[Mapping[str, Any]], *, narrow: bool = False) -> Figure:
    """Losses, mean IoU and pixel accuracy against the epoch.

    Args:
        history: per evaluation a mapping with "epoch", "train_loss", "test_loss", "test_miou" and
            "test_pixel_accuracy".
        narrow: one panel per row, for a phone.
    """
    epochs = [row["epoch"] for row in history]
    rows, columns = (2, 1) if narrow else (1, 2)
    figure = Figure(figsize=(4.2 * columns, (2.8 if narrow else 3.4) * rows), layout="constrained")
    losses, shares = figure.subplots(rows, columns).ravel()
    for key, name in (("train_loss", "training"), ("test_loss", "test")):
        losses.plot(epochs, [row[key] for row in history], marker=".", label=name)
    losses.set(title="Cross-entropy", ylabel="nats per pixel")
    for key, name in (("test_miou", "mean IoU"), ("test_pixel_accuracy", "pixel accuracy")):
        shares.plot(epochs, [100 * row[key] for row in history], marker=".", label=name)
    shares.set(title=f"Mean IoU: {100 * history[-1]['test_miou']:.1f} %", ylabel="%")
    for axis in (losses, shares):
        axis.legend(frameon=False)
        axis.set_xlabel("epoch")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
    return figure


def class_bars(
    evaluation: SegmentationEvaluation, classes: Sequence[str], *, narrow: bool = False
) -> Figure:
    """A bar for each class that has an IoU, the best first, in columns of 50.

    Args:
        evaluation: of C classes.
        classes: C names.
        narrow: all in one column, for a phone.
    """
    values = evaluation.iou.numpy()
    order = [int(place) for place in np.argsort(-values, kind="stable") if values[place] >= 0]
    per_column = len(order) if narrow else _BARS
    columns = [order[start : start + per_column] for start in range(0, len(order), per_column)]
    height = 0.8 + 0.19 * len(columns[0])
    figure = Figure(figsize=(4.4 * len(columns), height), layout="constrained")
    for axis, places in zip(
        figure.subplots(1, len(columns), squeeze=False)[0], columns, strict=True
    ):
        shares = 100 * values[places]
        bars = axis.barh(range(len(places)), shares, color="tab:blue")
        axis.bar_label(bars, [f"{share:.1f}" for share in shares], padding=2, fontsize=7)
        names = [_cut(classes[place], 28) for place in places]
        axis.set_yticks(range(len(places)), names, fontsize=7)
        axis.set(xlim=(0, 112), ylim=(len(columns[0]) - 0.5, -0.5), xlabel="IoU, %")
        axis.grid(alpha=0.3, axis="x")
    return figure


def overlay_sheet(
    triples: Sequence[tuple[LabelledImage, np.ndarray]],
    classes: Sequence[str],
    colours: Sequence[tuple[int, int, int]],
) -> Image.Image:
    """A row of image, truth and prediction for each, beside a legend of the classes in them.

    Args:
        triples: labelled images of H × W pixels and their predicted class indices [H, W].
        classes: names by class index.
        colours: likewise.
    """
    rows = []
    for (image, labels), predicted in triples:
        row = [image, overlaid(image, labels, colours), overlaid(image, predicted, colours)]
        factor = _PICTURE_SIDE / max(image.size)
        size = tuple(max(round(side * factor), 1) for side in image.size)
        # Small images are magnified so that their pixels are seen.
        how = Image.Resampling.NEAREST if factor > 1 else Image.Resampling.LANCZOS
        rows.append([picture.resize(size, how) for picture in row])
    column = max(row[0].width for row in rows) + _GAP
    width = 3 * column - _GAP
    height = _HEADING + sum(row[0].height + _GAP for row in rows) - _GAP
    sheet = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.truetype(findfont("DejaVu Sans"), _HEADING * 2 // 3)
    for place, heading in enumerate(("image", "truth", "prediction")):
        draw.text((place * column, _HEADING // 2), heading, fill="black", font=font, anchor="lm")
    top = _HEADING
    for row in rows:
        for place, picture in enumerate(row):
            sheet.paste(picture, (place * column, top))
        top += row[0].height + _GAP
    seen = np.unique(np.concatenate([a.ravel() for (_, b), c in triples for a in (b, c)]))
    entries = [(classes[place], colours[place]) for place in seen if place != IGNORED]
    return with_legend(sheet, entries)


def _predicted_images(
    task: Segmentation, result: TrainResult
) -> list[tuple[LabelledImage, np.ndarray]]:
    """Some test images, evenly spaced, with what the model predicts for them."""
    items = task.test_set.items
    device = next(result.model.parameters()).device
    segment = task.view.segment(result.model, len(task.classes), task.precision)
    found = []
    for place in np.linspace(0, len(items) - 1, min(_SHOWN_IMAGES, len(items))).astype(int):
        try:
            item = items[int(place)]
        except DamagedItem:  # the evaluation has named it, or the run would have stopped
            continue
        logits = segment(task.test_set.transform(item, int(place)).image.to(device))
        labels = predicted_labels(logits, item.labels.shape)
        found.append((item, labels.cpu().numpy().astype(np.uint8)))
    return found


def _csv(task: Segmentation, evaluation: SegmentationEvaluation) -> str:
    rows = task.figures(evaluation)["classes"]
    return csv_text(list(rows[0]), rows)


def _cut(name: str, length: int) -> str:
    return name if len(name) <= length else name[: length - 1] + "…"
