"""Opening a checkpoint's images and masks again, to evaluate its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vision_ttt.data import DatasetError
from vision_ttt.engine.checkpoint import ModelMetadata
from vision_ttt.engine.config import MachineSection, TaskSection, TrainConfig
from vision_ttt.tasks.dense.config import check_below_root
from vision_ttt.tasks.segmentation.config import SegmentationData
from vision_ttt.tasks.segmentation.metadata import INPUT
from vision_ttt.tasks.segmentation.roots import ROOTS
from vision_ttt.tasks.segmentation.task import PARTS, Segmentation

_FORMER = {"letters": "root_options"}
"""Name of a field in checkpoints of earlier versions → its present name."""


def reopen(
    task: TaskSection,
    metadata: ModelMetadata,
    changes: Mapping[str, Any],
    *,
    part: str,
    precision: str,
    num_workers: int,
) -> Segmentation:
    """Return the task of a checkpoint with its data open, or with other data.

    Args:
        task: its section, as far as it matters to the evaluation.
        changes: fields of the section `data`; `dataset` stands for `root`.
        part: of the data that becomes the test set: "test", "train" or "all".
        precision, num_workers: as in the section `machine`.

    Raises:
        DatasetError: the checkpoint holds no dataset and none is given; a change is of no field;
            the dataset's classes are not the model's.
        UserError: `dataset` is given, and a path of the checkpoint's data is absolute.
    """
    fields = {name: value for name, value in changes.items() if name != "dataset"}
    if "dataset" in changes:
        fields = {"root_options": {}, **fields, "root": changes["dataset"]}
    known = {_FORMER.get(name, name): value for name, value in metadata.data.items()}
    if "root" not in {**known, **fields}:
        raise DatasetError("the checkpoint does not name its dataset; give --dataset")
    shown = {name: metadata.carried["input"][name] for name in INPUT}
    try:
        data = SegmentationData(**{**known, **shown, **fields})
    except TypeError as error:  # of another version, or a field that segmentation does not have
        raise DatasetError(f"the data of a segmenter: {error}") from error
    machine = MachineSection(precision=precision, num_workers=num_workers)
    parts = PARTS if part == "all" else (part,)
    if "dataset" in changes and data.root not in ROOTS:
        paths = [f"{each}_{kind}" for each in parts for kind in ("images", "masks")]
        check_below_root(data, [name for name in paths if name not in changes])
    opened = Segmentation(TrainConfig(task, data, machine=machine), parts)
    opened.set_evaluation_data(metadata, part)
    return opened
