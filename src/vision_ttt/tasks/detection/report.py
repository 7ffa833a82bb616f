"""Figures and tables of a detector's training run, written into its directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from vision_ttt.data.images import open_labelled
from vision_ttt.engine.checkpoint import BEST_FILE
from vision_ttt.engine.csv_text import csv_text
from vision_ttt.engine.task import Report
from vision_ttt.engine.train import TrainResult
from vision_ttt.explain.report import Section
from vision_ttt.files import write_bytes, write_text
from vision_ttt.tasks.detection.evaluation import KINDS, DetectionEvaluation, Detections
from vision_ttt.tasks.detection.pictures import SHOWN_SCORE, DrawnObject, drawn
from vision_ttt.tasks.images.pictures import as_figure, as_png, palette, with_legend

if TYPE_CHECKING:
    from vision_ttt.tasks.detection.task import Detection

_SHOWN_IMAGES = 6
_PICTURE_SIDE = 480  # pixels of a picture's longer side on the sheet
_GAP = 8  # pixels between pictures
_NAMED_CURVES = 10  # classes; beyond that their curves have no names
_BARS = 40  # in a column

Pair = tuple[Image.Image, Image.Image]
"""An image with its true objects, and with those that were found."""


def write_report(task: Detection, result: TrainResult) -> Report:
    """Write curves.png, ap.png, ap.csv, precision_recall.png, overlays.png; return the page's."""
    history, evaluation = result.metrics["history"], result.evaluation
    sheet = overlay_sheet(task, evaluation, _SHOWN_IMAGES)
    sections = {
        "curves": Section(
            "Training",
            "The detector's losses in training, and average precision in the test images at each "
            "evaluation.",
            learning_curves(history),
            learning_curves(history, narrow=True),
        ),
        "ap": Section(
            "Average precision by class",
            "COCO's: the mean over IoU thresholds from 0.5 to 0.95, the best boxes first. Classes "
            "without an object in the test images are left out.",
            class_bars(evaluation),
            class_bars(evaluation, narrow=True),
        ),
        "precision_recall": Section(
            "Precision by recall",
            "At IoU 0.5, of the mean over classes and of each class.",
            precision_curves(evaluation),
            precision_curves(evaluation, narrow=True),
        ),
        "overlays": Section(
            "Test images",
            "Left: what is there, right: what was found with a score of at least "
            f"{SHOWN_SCORE:.0%}. Evenly spaced in the test data, not selected.",
            as_figure(sheet),
            as_figure(overlay_sheet(task, evaluation, _SHOWN_IMAGES // 2)),
        ),
    }
    for name, section in sections.items():
        content = as_png(sheet) if name == "overlays" else section.png
        write_bytes(result.run_dir / f"{name}.png", content)
    table = result.run_dir / "ap.csv"
    write_text(table, _csv(evaluation))
    metrics = result.metrics
    measured = {
        "test box AP": f"{metrics['test_box_ap']:.2%} (at IoU 0.5: {metrics['test_box_ap50']:.2%})",
        "test mask AP": (
            f"{metrics['test_mask_ap']:.2%} (at IoU 0.5: {metrics['test_mask_ap50']:.2%})"
        ),
        "best test box AP": f"{metrics['best_test_box_ap']:.2%}",
    }
    best = result.run_dir / BEST_FILE
    next_command = f"vision-ttt predict FILES --checkpoint {best} --pictures FOLDER"
    return Report(list(sections.values()), measured, {"AP by class": table}, next_command)


def learning_curves(history: Sequence[Mapping[str, Any]], *, narrow: bool = False) -> Figure:
    """Training loss and average precision against the epoch.

    Args:
        history: per evaluation a mapping with "epoch", "train_loss" and the metrics, "test_" before
            their names.
        narrow: one panel per row, for a phone.
    """
    epochs = [row["epoch"] for row in history]
    figure, (losses, precisions) = _panels(narrow)
    losses.plot(epochs, [row["train_loss"] for row in history], marker=".")
    losses.set(title="Training loss", ylabel="sum of the detector's losses")
    for kind in KINDS:
        for name, style in (("ap", "-"), ("ap50", "--")):
            precisions.plot(
                epochs,
                [100 * row[f"test_{kind}_{name}"] for row in history],
                style,
                marker=".",
                color=_colour(kind),
                label=f"{kind} {'AP' if name == 'ap' else 'AP at IoU 0.5'}",
            )
    precisions.set(title=f"Box AP: {100 * history[-1]['test_box_ap']:.1f} %", ylabel="%")
    precisions.legend(frameon=False)
    for axis in (losses, precisions):
        axis.set_xlabel("epoch")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
    return figure


def class_bars(evaluation: DetectionEvaluation, *, narrow: bool = False) -> Figure:
    """Two bars, of boxes and masks, for each class that has objects, the best first.

    Args:
        evaluation: what is shown.
        narrow: all in one column, for a phone.
    """
    rows = [row for row in evaluation.classes if row["box_ap"] is not None]
    rows.sort(key=lambda row: -row["box_ap"])
    per_column = len(rows) if narrow else _BARS
    columns = [rows[start : start + per_column] for start in range(0, len(rows), per_column)]
    height = 1.0 + 0.24 * len(columns[0])
    figure = Figure(figsize=(4.2 * len(columns), height), layout="constrained")
    axes = figure.subplots(1, len(columns), squeeze=False)[0]
    for axis, column in zip(axes, columns, strict=True):
        places = np.arange(len(column))
        for kind, shift in (("box", -0.2), ("mask", 0.2)):
            values = [100 * row[f"{kind}_ap"] for row in column]
            axis.barh(places + shift, values, 0.4, color=_colour(kind), label=kind)
        axis.set_yticks(places, [f"{row['class']} ({row['objects']})" for row in column])
        axis.tick_params(axis="y", labelsize=8)
        axis.set(xlim=(0, 100), ylim=(len(column) - 0.5, -0.5), xlabel="AP, %")
        axis.grid(alpha=0.3, axis="x")
        axis.legend(frameon=False, fontsize=8)
    return figure


def precision_curves(evaluation: DetectionEvaluation, *, narrow: bool = False) -> Figure:
    """Precision against recall at IoU 0.5, of boxes and of masks.

    Args:
        evaluation: what is shown.
        narrow: one panel per row, for a phone.
    """
    figure, axes = _panels(narrow)
    names = [row["class"] for row in evaluation.classes]
    for axis, kind in zip(axes, KINDS, strict=True):
        curves = evaluation.curves[kind]
        held = [label for label in range(len(names)) if not np.isnan(curves[:, label]).any()]
        named = len(held) <= _NAMED_CURVES
        for label in held:
            colour = {} if named else {"color": "0.7"}
            axis.plot(
                evaluation.recalls,
                curves[:, label],
                linewidth=0.8,
                label=names[label] if named else None,
                **colour,
            )
        mean = curves[:, held].mean(axis=1)
        axis.plot(evaluation.recalls, mean, color="black", linewidth=2, label="mean")
        title = f"{kind.capitalize()}es" if kind == "box" else f"{kind.capitalize()}s"
        axis.set(title=title, xlabel="recall", ylabel="precision", xlim=(0, 1), ylim=(0, 1.02))
        axis.legend(frameon=False, fontsize=7, loc="lower left")
        axis.grid(alpha=0.3)
    return figure


def overlay_sheet(task: Detection, evaluation: DetectionEvaluation, count: int) -> Image.Image:
    """Return up to `count` test images with their objects, and beside each what was found."""
    chosen = np.linspace(0, len(evaluation.found) - 1, min(count, len(evaluation.found)))
    colours = palette(len(task.classes))
    seen: set[int] = set()
    pairs: list[Pair] = []
    for turn in chosen.astype(int).tolist():
        place, found = evaluation.found[turn]
        path = task.test_set.items.folder / task.annotations.name(place)
        height, width = task.annotations.sizes[place].tolist()
        image = open_labelled(path, (width, height))
        known, believed = _known(task, place), _found(found)
        seen |= {each.label for each in (*known, *believed)}
        left, right = (
            drawn(image, group, task.classes, colours, longer_side=_PICTURE_SIDE)
            for group in (known, believed)
        )
        pairs.append((left, right))
    width = max(left.width for left, _ in pairs)
    height = sum(left.height for left, _ in pairs) + _GAP * (len(pairs) - 1)
    sheet = Image.new("RGB", (2 * width + _GAP, height), "white")
    top = 0
    for left, right in pairs:
        sheet.paste(left, (0, top))
        sheet.paste(right, (width + _GAP, top))
        top += left.height + _GAP
    entries = [(task.classes[label - 1], colours[label - 1]) for label in sorted(seen)]
    return with_legend(sheet, entries)


def _known(task: Detection, place: int) -> list[DrawnObject]:
    annotations = task.annotations
    return [
        DrawnObject(
            annotations.category_ids.index(each["category_id"]) + 1,
            _corners(each["bbox"]),
            each["segmentation"],
        )
        for each in annotations.truth(place)
        if not each["iscrowd"]
    ]


def _found(found: Detections) -> list[DrawnObject]:
    return [
        DrawnObject(int(label), box.tolist(), mask, float(score))
        for label, box, mask, score in zip(
            found.labels, found.boxes, found.masks, found.scores, strict=True
        )
        if score >= SHOWN_SCORE
    ]


def _corners(box: Sequence[float]) -> list[float]:
    x, y, width, height = box
    return [x, y, x + width, y + height]


def _panels(narrow: bool) -> tuple[Figure, tuple[Axes, Axes]]:
    """A figure of two panels, one above the other for a phone."""
    rows, columns = (2, 1) if narrow else (1, 2)
    figure = Figure(figsize=(4.2 * columns, (2.8 if narrow else 3.4) * rows), layout="constrained")
    first, second = figure.subplots(rows, columns).ravel()
    return figure, (first, second)


def _colour(kind: str) -> str:
    return {"box": "tab:blue", "mask": "tab:orange"}[kind]


def _csv(evaluation: DetectionEvaluation) -> str:
    """The classes' figures, and below them those of all."""
    objects = sum(row["objects"] for row in evaluation.classes)
    last = {"class": "all", "objects": objects, **evaluation.metrics}
    return csv_text(list(evaluation.classes[0]), [*evaluation.classes, last])
