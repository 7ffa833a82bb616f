"""Opening a checkpoint's data again, to evaluate its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vision_ttt import recipes
from vision_ttt.data import DatasetError
from vision_ttt.engine.checkpoint import ModelMetadata
from vision_ttt.tasks.images.task import ImageTask


def reopen(
    metadata: ModelMetadata,
    changes: Mapping[str, Any],
    *,
    task: Mapping[str, Any],
    part: str,
    precision: str,
    num_workers: int,
) -> ImageTask:
    """Return the task of a checkpoint with its data open, or with other data.

    Args:
        changes: fields of the section `data`; another `dataset` leaves nothing of the former one.
        task: the section `task`, as far as it counts for evaluation.
        part: of the data that becomes the test set: "test", "train" or "all".
        precision, num_workers: as in the section `machine`.

    Raises:
        DatasetError: the checkpoint holds no dataset and none is given, or the dataset's classes
            are not the model's.
    """
    data = {**metadata.data, **changes}
    if "dataset" in changes:
        data = {**changes, "num_classes": len(metadata.carried["classes"])}
    if "dataset" not in data:
        raise DatasetError("the checkpoint does not name its dataset; give --dataset")
    machine = {"precision": precision, "num_workers": num_workers}
    config = recipes.resolve({"task": task, "data": data, "machine": machine})
    opened = config.task.open(config)
    opened.show_to(metadata, part)
    return opened
