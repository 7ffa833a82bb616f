"""Runs on the scenes as tables and curves: mean and spread over seeds, beside what is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from studies.scenes.results import Finished
from studies.spread import Spread
from vision_ttt.bench.tables import Table


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

_CLASS_METRICS = {
    "classification": {"accuracy": "accuracy"},
    "detection": {"box_ap50": "box AP 0.5", "mask_ap50": "mask AP 0.5"},
    "segmentation": {"iou": "IoU"},
}


def compare(task: str, runs: Sequence[Finished]) -> Table:
    """A line per model: size, cost, the metrics that the task is judged by, times and seeds."""
    goals = GOALS[task]
    headings = ["model", "parameters", "of them maps", "maps' MACs"]
    headings += [f"{goal.title}, %" for goal in goals]
    headings += ["training, s", "seeds"]
    lines = []
    for model, own in _by_model(runs).items():
        results = [each.result for each in own]
        metrics = [
            Spread.of([100 * getattr(result, goal.metric) for result in results]).text(1)
            for goal in goals
        ]
        first = results[0]
        lines.append(
            [
                f"{model} ({first.backbone})",
                f"{first.parameters:,}",
                f"{first.maps_parameters:,}",
                f"{first.maps_macs / 1e6:.0f}M",
                *metrics,
                Spread.of([result.seconds for result in results]).text(0),
                ", ".join(str(result.seed) for result in results),
            ]
        )
    asked = [f"≥ {100 * goal.bar:.0f} (goal {100 * goal.goal:.0f})" for goal in goals]
    lines.append(["asked for", "", "", "", *asked, "", ""])
    return Table(headings, lines)


def by_class(task: str, runs: Sequence[Finished]) -> Table:
    """A line per class: each model's metrics, mean and spread over seeds; - for a class without."""
    metrics = _CLASS_METRICS[task]
    models = _by_model(runs)
    headings = ["class"]
    headings += [f"{model}: {title}, %" for model in models for title in metrics.values()]
    lines = []
    for place, first in enumerate(runs[0].classes):
        line = [first["class"]]
        for own in models.values():
            for name in metrics:
                values = [each.classes[place][name] for each in own]
                if any(value is None for value in values):
                    line.append("-")
                else:
                    line.append(Spread.of([100 * value for value in values]).text(1))
        lines.append(line)
    return Table(headings, lines)


def learning_curves(task: str, runs: Sequence[Finished], *, narrow: bool = False) -> Figure:
    """Training loss and metrics on the held-out images against the update, a line per run.

    Args:
        runs: of one task, any models and seeds.
        narrow: one panel per row, for a phone.
    """
    goals = GOALS[task]
    panels = 1 + len(goals)
    rows, columns = (panels, 1) if narrow else (1, panels)
    figure = Figure(figsize=(4.2 * columns, (2.8 if narrow else 3.4) * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for place, (model, own) in enumerate(_by_model(runs).items()):
        for number, each in enumerate(own):
            updates = [row["update"] for row in each.history]
            style = {"color": f"C{place}", "marker": ".", "label": "" if number else model}
            axes[0].plot(updates, [row["train_loss"] for row in each.history], **style)
            for axis, goal in zip(axes[1:], goals, strict=True):
                values = [100 * row[f"test_{goal.metric}"] for row in each.history]
                axis.plot(updates, values, **style)
    axes[0].set(title="Training loss")
    for axis, goal in zip(axes[1:], goals, strict=True):
        axis.set(title=f"{goal.title[0].upper()}{goal.title[1:]}", ylabel="%", ylim=(0, 100))
        axis.axhline(100 * goal.bar, color="grey", linestyle=":", linewidth=1)
    for axis in axes:
        axis.set_xlabel("update")
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    return figure


def describe_scene_runs(runs: Sequence[Finished]) -> str:
    """What the numbers are and where they come from, in one paragraph."""
    first = runs[0].result
    run = first.run
    commits = sorted({each.result.run.commit for each in runs} - {""})
    started = sorted(each.result.run.started for each in runs)
    parts = [
        f"{run.command}: mean ± sample standard deviation over seeds, on {first.test_images:,}"
        f" held-out images of {first.side} × {first.side} pixels; {first.updates:,} updates of"
        f" {first.batch_size} images, from {first.train_images:,} images",
        f"{run.device_name}, {run.threads} threads",
        f"torch {run.torch}, timm {run.timm}, vision-ttt {run.vision_ttt}",
        f"begun {started[0]} to {started[-1]}",
        *([f"commit {', '.join(commits)}"] if commits else []),
    ]
    return "; ".join(parts) + "."


def _by_model(runs: Sequence[Finished]) -> dict[str, list[Finished]]:
    found: dict[str, list[Finished]] = {}
    for each in runs:
        found.setdefault(each.result.model, []).append(each)
    return {model: sorted(own, key=lambda each: each.result.seed) for model, own in found.items()}
