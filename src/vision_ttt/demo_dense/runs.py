"""Nano models for segmentation and detection, compared on the rendered scenes.

Backbones learn to classify single objects first, then to segment, then to detect. Every model has
the same adapter, heads, data and number of updates: those of the task's recipe.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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

MODELS: dict[str, dict[str, Any]] = {
    "vittt": {},
    # Of the same width, depth, heads and patches as Vittt-nano.
    "deit": {
        "model.name": "deit_tiny_patch16_224",
        "model.arguments": {
            "embed_dim": 96,
            "depth": 4,
            "num_heads": 3,
        },
    },
}
"""Name → what it changes in the recipes."""


@dataclass(frozen=True)
class Goal:
    """A figure that a run is judged by."""

    metric: str
    """Its name in metrics.json without "test_"."""
    title: str
    bar: float
    """What is asked for, from 0 to 1."""
    goal: float
    """What is hoped for."""


GOALS = {
    "classification": (Goal("accuracy", "accuracy", 0.85, 0.95),),
    "detection": (
        Goal("box_ap50", "box AP at IoU 0.5", 0.75, 0.90),
        Goal("mask_ap50", "mask AP at IoU 0.5", 0.65, 0.85),
    ),
    "segmentation": (Goal("miou", "mean IoU", 0.80, 0.90),),
}
"""Task → what its runs are judged by, on held-out images."""


def scene_run(
    task: str,
    model: str,
    seed: int,
    scenes: Path,
    output: Path,
    overrides: Mapping[str, Any],
) -> TrainConfig:
    """Return the run of a model for a task; it starts from the same model's and seed's run of the
    task before it (`STARTS`).

    Args:
        task: of `RECIPES`.
        model: of `MODELS`.
        scenes: folder that the scenes are rendered in.
        output: folder of all runs; the run's own is below it.
        overrides: further fields, as for :func:`vision_ttt.recipes.load`.

    Raises:
        ConfigError: a field is unknown or a value out of its range.
    """
    field, folder = _DATA[task]
    own = {
        field: str(scenes / folder),
        "run.seed": seed,
        "run.output": str(_folder(output, task, model, seed)),
    }
    if task in STARTS:
        from vision_ttt.engine.checkpoint import WEIGHTS_FILE  # with PyTorch

        weights = _folder(output, STARTS[task], model, seed) / WEIGHTS_FILE
        own["model.initial_weights"] = str(weights)
    return recipes.load(RECIPES[task], {**MODELS[model], **own, **overrides})


def with_starts(tasks: Iterable[str]) -> list[str]:
    """Return tasks of `RECIPES` with those that they start from, in the order of training."""
    needed = set()
    for task in tasks:
        while task is not None:
            needed.add(task)
            task = STARTS.get(task)
    return [task for task in RECIPES if task in needed]


def _folder(output: Path, task: str, model: str, seed: int) -> Path:
    return output / task / model / f"seed-{seed}"
