"""Figures and tables of a detector's training run, written into its directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from vision_ttt.data.images import open_labelled
from vision_ttt.engine.checkpoint import BEST_FILE
from vision_ttt.engine.csv_text import csv_text
from vision_ttt.engine.task import Report
from vision_ttt.engine.train import TrainResult
from vision_ttt.explain.report import Picture
from vision_ttt.files import write_text
from vision_ttt.tasks.detection.evaluation import KINDS, DetectionEvaluation
from vision_ttt.tasks.detection.pictures import SHOWN_SCORE, DrawnObject, corners, drawn
from vision_ttt.tasks.figures import (
    Curves,
    class_bars,
    learning_curves,
    panels_of_figure,
    save,
    section,
)
from vision_ttt.tasks.images.pictures import as_png, palette, picture_rows, with_legend

if TYPE_CHECKING:
    from vision_ttt.tasks.detection.task import Detection

_SHOWN_IMAGES = 6
_PICTURE_SIDE = 480  # pixels of a picture's longer side on the sheet
_NAMED_CURVES = 10  # classes; beyond that their curves have no names


def write_report(task: Detection, result: TrainResult) -> Report:
    """Write curves.png, ap.png, ap.csv, precision_recall.png, overlays.png; return the page's."""
    history, evaluation, metrics = result.metrics["history"], result.evaluation, result.metrics
    names = {"ap": "AP", "ap50": "AP at IoU 0.5"}
    precisions = {f"test_{k}_{key}": f"{k} {name}" for k in KINDS for key, name in names.items()}
    panels = [
        Curves("Training loss", "sum of the detector's losses", {"train_loss": "training"}),
        Curves(f"Box AP: {metrics['test_box_ap']:.1%}", "%", precisions, 100),
    ]
    classes = [f"{row['class']} ({row['objects']})" for row in evaluation.classes]
    bars = {kind: [row[f"{kind}_ap"] for row in evaluation.classes] for kind in KINDS}
    sections = {
        "curves": section(
            "Training",
            "The detector's losses in training, and average precision in the test images at each "
            "evaluation.",
            learning_curves,
            *(history, panels),
        ),
        "ap": section(
            "Average precision by class",
            "COCO's: the mean over IoU thresholds from 0.5 to 0.95, the best boxes first. Classes "
            "without an object in the test images are left out.",
            class_bars,
            *(classes, bars, "AP, %"),
        ),
        "precision_recall": section(
            "Precision by recall",
            "At IoU 0.5, of the mean over classes and of each class.",
            precision_curves,
            evaluation,
        ),
        "overlays": Picture(
            "Test images",
            "Left: what is there, right: what was found with a score of at least "
            f"{SHOWN_SCORE:.0%}. Evenly spaced in the test data, not selected.",
            as_png(overlay_sheet(task, evaluation, _SHOWN_IMAGES)),
        ),
    }
    objects = sum(row["objects"] for row in evaluation.classes)
    rows = [*evaluation.classes, {"class": "all", "objects": objects, **evaluation.metrics}]
    table = result.run_dir / "ap.csv"
    write_text(table, csv_text(list(rows[0]), rows))
    measured = {
        f"test {kind} AP": f"{metrics[f'test_{kind}_ap']:.2%} (at IoU 0.5:"
        f" {metrics[f'test_{kind}_ap50']:.2%})"
        for kind in KINDS
    }
    measured["best test box AP"] = f"{metrics['best_test_box_ap']:.2%}"
    best = result.run_dir / BEST_FILE
    next_command = ("predict", "FILES", "--checkpoint", str(best), "--pictures", "FOLDER")
    shown = save(sections, result.run_dir)
    return Report(shown, measured, {"AP by class": table}, next_command)


def precision_curves(evaluation: DetectionEvaluation, *, narrow: bool = False) -> Figure:
    """Precision against recall at IoU 0.5, of boxes and of masks."""
    figure, axes = panels_of_figure(len(KINDS), narrow)
    names = [row["class"] for row in evaluation.classes]
    for axis, kind in zip(axes, KINDS, strict=True):
        curves = evaluation.curves[kind]
        held = [label for label in range(len(names)) if not np.isnan(curves[:, label]).any()]
        named = len(held) <= _NAMED_CURVES
        for label in held:
            style = {"label": names[label]} if named else {"color": "0.7"}
            axis.plot(evaluation.recalls, curves[:, label], linewidth=0.8, **style)
        mean = curves[:, held].mean(axis=1)
        axis.plot(evaluation.recalls, mean, color="black", linewidth=2, label="mean")
        title = {"box": "Boxes", "mask": "Masks"}[kind]
        axis.set(title=title, xlabel="recall", ylabel="precision", xlim=(0, 1), ylim=(0, 1.02))
        axis.legend(frameon=False, fontsize=7, loc="lower left")
        axis.grid(alpha=0.3)
    return figure


def overlay_sheet(task: Detection, evaluation: DetectionEvaluation, count: int) -> Image.Image:
    """Return up to `count` test images with their objects, and beside each what was found."""
    chosen = np.linspace(0, len(evaluation.found) - 1, min(count, len(evaluation.found)))
    annotations, colours = task.annotations, palette(len(task.classes))
    seen: set[int] = set()
    rows = []
    for turn in chosen.astype(int).tolist():
        place, found = evaluation.found[turn]
        path = task.test_set.items.folder / annotations.name(place)
        height, width = annotations.sizes[place].tolist()
        image = open_labelled(path, (width, height))
        known = [
            DrawnObject(
                annotations.category_ids.index(each["category_id"]) + 1,
                corners(each["bbox"]),
                each["segmentation"],
            )
            for each in annotations.truth(place)
            if not each["iscrowd"]
        ]
        every = zip(found.labels, found.boxes, found.masks, found.scores, strict=True)
        believed = [
            DrawnObject(int(label), box.tolist(), mask, float(score))
            for label, box, mask, score in every
            if score >= SHOWN_SCORE
        ]
        seen |= {each.label for each in (*known, *believed)}
        rows.append(
            [
                drawn(image, group, task.classes, colours, longer_side=_PICTURE_SIDE)
                for group in (known, believed)
            ]
        )
    entries = [(task.classes[label - 1], colours[label - 1]) for label in sorted(seen)]
    return with_legend(picture_rows(rows, ("there", "found")), entries)
