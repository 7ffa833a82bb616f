"""Backbones at equal time on real pixels: cut-outs on photographs, at 512² and 1024²."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from studies.stamps import RECIPE
from studies.stamps.dataset import CLASS_NAMES, StampImages
from studies.stamps.images import StampPictures, StampSettings
from studies.sweeps import TITLES
from studies.sweeps.definition import Column, GivenSeconds, Panel, Sweep, Variant
from studies.sweeps.label_pictures import packed, unpacked
from studies.sweeps.letters import COMPARED, LABELS, backbone, rate_of
from studies.sweeps.tables import by_row
from vision_ttt.data import SeededItems
from vision_ttt.errors import UserError
from vision_ttt.tasks.segmentation.pictures import class_colours
from vision_ttt.tasks.segmentation.transforms import TestTransform

if TYPE_CHECKING:
    from studies.sweeps.results import Result
    from vision_ttt.engine.train import TrainResult

SECONDS = 360
"""Of training, on one thread."""
TEST_IMAGES = {512: 64, 1024: 16}
"""Side of the pictures → how many are tested: as many cut-outs at each."""
SHRUNK = 2
"""Sides of the labels in the picture, as a part of the pictures'."""
SHOWN, SIDE_SHOWN = ("vittt", "conv-deit"), 512
"""Models and side in the picture."""


def _row(model: str, side: int) -> Variant:
    """A model for the given seconds, at the learning rate chosen on letters."""
    changes: dict[str, Any] = {
        **backbone(model, side),
        "data.root_options": {"side": side, "test_images": TEST_IMAGES[side]},
        "data.crop_size": side,
        "data.shorter_side": side,
        "data.test_shorter_side": side,
        "learning_rate": rate_of(model, side),
        # The seconds set the number of updates, and scale these.
        "updates": 1000,
        "warmup": 40,
        "evaluate_every": 500,
    }
    return Variant(f"{model}-{side}", changes, length=GivenSeconds(SECONDS))


def examine_stamps(trained: TrainResult) -> dict[str, Any]:
    """Return the peak of memory, and the labels of the first test picture, smaller."""
    task, history = trained.task, trained.metrics["history"]
    own: StampImages = task.parts["test"]
    side = own.pictures.settings.side
    items = SeededItems(own, TestTransform(task.statistics, side, side))
    segment = task.view.segment(trained.model, len(task.classes), task.precision)
    with torch.inference_mode():
        labels = segment(items[0].image).argmax(0).numpy().astype(np.uint8)
    return {
        "memory_bytes": max(row["memory_bytes"] for row in history),
        "labels": packed(labels[::SHRUNK, ::SHRUNK], task.classes),
    }


def stamp_figure(sweep: Sweep, results: Sequence[Result]) -> Figure:
    """Return a picture of the first side, its true labels, and those of two models' first seed.

    Raises:
        UserError: there are no results, one is not of this sweep, or a model has none.
    """
    found = by_row(sweep, results)
    shown = {LABELS[model]: f"{model}-{SIDE_SHOWN}" for model in SHOWN}
    if missing := set(shown.values()) - found.keys():
        raise UserError(f"the picture needs results of {', '.join(sorted(missing))}")
    options = dict(sweep.by_name[next(iter(shown.values()))].changes["data.root_options"])
    del options["test_images"]
    picture = StampPictures(StampSettings(**options), "test").render(0)
    colours = np.array(class_colours(CLASS_NAMES), dtype=np.uint8)
    figure = Figure(figsize=(11, 3.3), layout="constrained")
    axes = figure.subplots(1, 2 + len(shown))
    axes[0].imshow(picture.image)
    axes[0].set_title(f"{options['side']}² pixels", fontsize=9)
    axes[1].imshow(colours[picture.labels])
    axes[1].set_title("true labels", fontsize=9)
    for axis, (label, row) in zip(axes[2:], shown.items(), strict=True):
        axis.imshow(colours[unpacked(found[row][0].measured["labels"])])
        axis.set_title(f"{label}: {found[row][0].test_accuracy:.0%} mean IoU", fontsize=9)
    for axis in axes:
        axis.set_xticks([])
        axis.set_yticks([])
    patches = [Patch(color=colours[k] / 255, label=name) for k, name in enumerate(CLASS_NAMES)]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8)
    return figure


STAMPS = Sweep(
    name="stamps",
    title=TITLES["stamps"],
    recipe=str(RECIPE),
    base={"num_workers": 0},
    rows=tuple(_row(model, side) for side in TEST_IMAGES for model in COMPARED),
    panels=tuple(
        Panel(f"{side}², equal time", {LABELS[model]: f"{model}-{side}" for model in COMPARED})
        for side in TEST_IMAGES
    ),
    caveat=(
        "Small-scale evidence: 0.58 to 0.59 million parameters without positions, trained from"
        " scratch for six minutes of one thread with 118 cut-outs of eight classes; tested on 38"
        " others, and on three photographs that training has not. Learning rates are those chosen"
        " on letters."
    ),
    columns=(
        Column("updates", lambda result: result.curve["update"][-1], 0),
        Column("training, s", lambda result: result.seconds, 0, is_time=True),
        Column("memory, GiB", lambda result: result.measured["memory_bytes"] / 2**30, 2),
    ),
    accuracy="test_miou",
    losses="without label smoothing, per pixel",
    examine=examine_stamps,
    draw=stamp_figure,
)
