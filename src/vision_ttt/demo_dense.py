"""The runs of `vision-ttt demo-dense`: nano models for segmentation and detection on the scenes.

Backbones learn to classify single objects first, then to segment, then to detect.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vision_ttt import recipes
from vision_ttt.engine.config import TrainConfig

RECIPES = {
    "classification": "scenes-classification",
    "segmentation": "scenes-segmentation",
    "detection": "scenes-detection",
}
"""Task → its recipe, in the order of training."""

STARTS = {"segmentation": "classification", "detection": "segmentation"}
"""Task → the one from whose backbone it starts, and adapter where that has one."""

_DATA = {
    "classification": ("data.dataset", "objects"),
    "segmentation": ("data.root", "ade"),
    "detection": ("data.root", "coco"),
}
"""Task → the field that says where its data are, and where vision_ttt.data.scenes has them."""


def scene_run(
    task: str,
    output: Path,
    overrides: Mapping[str, Any],
    *,
    model: str = "vittt",
    seed: int = 0,
) -> TrainConfig:
    """Return the run of a model for a task.

    The run starts from the run of the task before it (`STARTS`) with the same model and seed.

    Args:
        task: of `RECIPES`.
        output: folder of the scenes and of all runs; the run's own is TASK/MODEL/seed-K in it.
        overrides: further fields, as for :func:`vision_ttt.recipes.load`.
        model: what the folder calls the model of the recipe and `overrides`.

    Raises:
        ConfigError: a field is unknown or a value out of its range.
    """
    field, folder = _DATA[task]
    own = {
        field: str(output / "scenes" / folder),
        "run.seed": seed,
        "run.output": str(output / task / model / f"seed-{seed}"),
    }
    if task in STARTS:
        from vision_ttt.engine.checkpoint import WEIGHTS_FILE  # with PyTorch

        weights = output / STARTS[task] / model / f"seed-{seed}" / WEIGHTS_FILE
        own["model.initial_weights"] = str(weights)
    return recipes.load(RECIPES[task], {**own, **overrides})


def with_starts(tasks: Iterable[str]) -> list[str]:
    """Return tasks of `RECIPES` with those that they start from, in the order of training."""
    needed = set()
    for task in tasks:
        while task is not None:
            needed.add(task)
            task = STARTS.get(task)
    return [task for task in RECIPES if task in needed]
