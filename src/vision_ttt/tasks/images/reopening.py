"""Opening a checkpoint's data again, to evaluate its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vision_ttt.data import DatasetError
from vision_ttt.engine.checkpoint import ModelMetadata
from vision_ttt.engine.config import MachineSection, TaskSection, TrainConfig
from vision_ttt.tasks.images.config import ImageData
from vision_ttt.tasks.images.task import ImageTask


def reopen(
    task: TaskSection,
    metadata: ModelMetadata,
    changes: Mapping[str, Any],
    *,
    part: str,
    precision: str,
    num_workers: int,
) -> ImageTask:
    """Return the task of a checkpoint with its data open, or with other data.

    Args:
        task: its section, as far as it matters to the evaluation.
        changes: fields of the section `data`; another `dataset` leaves nothing of the former one.
        part: of the data that becomes the test set: "test", "train" or "all".
        precision, num_workers: as in the section `machine`.

    Raises:
        DatasetError: the checkpoint holds no dataset and none is given, or the dataset's classes
            are not the model's, or the description of the dataset is damaged.
    """
    data = {**metadata.data, **changes}
    if "dataset" in changes:
        data = {**changes, "num_classes": len(metadata.carried["classes"])}
    if "dataset" not in data:
        raise DatasetError("the checkpoint does not name its dataset; give --dataset")
    try:
        described = ImageData(**data)
    except TypeError as error:  # of another version, or damaged
        raise DatasetError(f"the checkpoint's data: {error}; give --dataset") from error
    machine = MachineSection(precision=precision, num_workers=num_workers)
    opened = task.open(TrainConfig(task, described, machine=machine))
    opened.set_evaluation_data(metadata, part)
    return opened
