"""What runs on the scenes gave: a row of a CSV file each, with all that repeating it needs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from vision_ttt.bench.complexity import count_macs, count_parameters
from vision_ttt.bench.rows import Run, write_cells
from vision_ttt.dense.model import DenseModel
from vision_ttt.engine import TrainConfig
from vision_ttt.engine.run_directory import differences
from vision_ttt.engine.train import TrainResult
from vision_ttt.files import write_text

RESULT_FILE = "result.json"
"""In a run's directory, written when it is finished."""


@dataclass(frozen=True)
class SceneResult:
    """One finished run on the scenes. Metrics of other tasks are None."""

    task: str
    model: str
    """Its name in :data:`studies.scenes.MODELS`."""
    seed: int
    backbone: str
    arguments: str
    """Of the backbone, JSON."""
    parts: str
    """Of adapter and heads, JSON; of a classifier none."""
    side: int
    """Height and width of the images in pixels."""
    train_images: int
    test_images: int
    updates: int
    batch_size: int
    learning_rate: float
    parameters: int
    maps_parameters: int
    """Of them, backbone and adapter; of a classifier all."""
    maps_macs: int
    """Their multiply-adds on one image."""
    train_loss: float
    """Mean since the last evaluation but one."""
    seconds: float
    """Of training, evaluations left out."""
    run: Run
    """Where, when and with what."""
    accuracy: float | None = None
    box_ap: float | None = None
    box_ap50: float | None = None
    mask_ap: float | None = None
    mask_ap50: float | None = None
    miou: float | None = None
    pixel_accuracy: float | None = None

    def cells(self) -> dict[str, Any]:
        """The result flat, column name → value: its own fields, then those of its run."""
        cells = dataclasses.asdict(self)
        return cells | cells.pop("run")


METRICS = ("accuracy", "box_ap", "box_ap50", "mask_ap", "mask_ap50", "miou", "pixel_accuracy")
"""The columns that hold metrics, named as in metrics.json without "test_"."""

_PLACES = {"run.output", "data.root", "data.dataset", "model.initial_weights"}
"""Fields of a run that are paths in the folder of all runs."""

_RUN_TYPES = get_type_hints(Run)
_OWN_TYPES = {name: kind for name, kind in get_type_hints(SceneResult).items() if name != "run"}
COLUMNS = (*_OWN_TYPES, *_RUN_TYPES)


@dataclass(frozen=True)
class Finished:
    """What a finished run left in its directory."""

    result: SceneResult
    classes: Sequence[Mapping[str, Any]]
    """The metrics of each class, as the task's own table has them."""
    history: Sequence[Mapping[str, Any]]
    """A row per evaluation, as in metrics.json."""
    folder: Path
    """Holds the run's figures."""


def describe_result(
    model: str, side: int, counts: Mapping[str, int], trained: TrainResult, run: Run
) -> SceneResult:
    """Return the row of a run.

    Args:
        model: its name in :data:`studies.scenes.MODELS`.
        side: of the images.
        counts: train_images and test_images.
        trained: what the run left.
        run: where and when it began.
    """
    config, metrics = trained.config, trained.metrics
    last = metrics["history"][-1]
    dense = isinstance(trained.model, DenseModel)
    maps = trained.model.maps if dense else trained.model
    return SceneResult(
        task=config.task.name,
        model=model,
        seed=config.run.seed,
        backbone=config.model.name,
        arguments=json.dumps(config.model.arguments),
        parts=json.dumps(config.task.parts if dense else {}),
        side=side,
        train_images=counts["train_images"],
        test_images=counts["test_images"],
        updates=last["update"],
        batch_size=config.optimisation.batch_size,
        learning_rate=config.optimisation.learning_rate,
        parameters=metrics["parameters"],
        maps_parameters=count_parameters(maps),
        maps_macs=count_macs(maps, (3, side, side)),
        train_loss=last["train_loss"],
        seconds=metrics["seconds"],
        run=run,
        **{name: metrics.get(f"test_{name}") for name in METRICS},
    )


def save_finished(
    config: TrainConfig,
    result: SceneResult,
    classes: Sequence[Mapping[str, Any]],
    history: Sequence[Mapping[str, Any]],
) -> None:
    """Write a run's result into its directory: from now on the run counts as finished."""
    content = {
        "config": config.as_dict(),
        "result": result.cells(),
        "classes": list(classes),
        "history": [
            {name: value for name, value in row.items() if not isinstance(value, dict)}
            for row in history
        ],
    }
    write_text(Path(config.run.output) / RESULT_FILE, json.dumps(content, indent=2) + "\n")


def find_finished(config: TrainConfig) -> Finished | None:
    """What this very run left where it is finished, else None."""
    folder = Path(config.run.output)
    path = folder / RESULT_FILE
    if not path.is_file():
        return None
    saved = json.loads(path.read_text(encoding="utf-8"))
    # The folder may be moved, and with it the scenes and the weights that a run starts from.
    if differences(saved["config"], config, besides=_PLACES):
        return None
    own = {name: saved["result"][name] for name in _OWN_TYPES}
    run = Run(**{name: saved["result"][name] for name in _RUN_TYPES})
    return Finished(SceneResult(**own, run=run), saved["classes"], saved["history"], folder)


def write_scene_results(path: Path, results: Iterable[SceneResult]) -> None:
    """Write a CSV file, whole or not at all; its folder is made where missing.

    Raises:
        OSError: it cannot be written; its former content is kept.
    """
    write_cells(path, COLUMNS, (result.cells() for result in results))
