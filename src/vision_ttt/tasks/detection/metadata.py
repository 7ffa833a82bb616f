"""What a detector's checkpoints carry, and the model that they describe."""

from __future__ import annotations

from vision_ttt.dense.building import build_detector
from vision_ttt.dense.detector import Detector
from vision_ttt.engine.checkpoint import ModelMetadata
from vision_ttt.engine.described import check_number, check_texts, check_whole_numbers
from vision_ttt.tasks.images.metadata import SIDE, check_statistics


def rebuild(metadata: ModelMetadata) -> Detector:
    """Build the detector that a checkpoint describes, randomly initialised.

    Raises:
        ValueError, TypeError, KeyError: the description is damaged.
    """
    _check_carried(metadata)
    return build_detector(metadata.model, **metadata.model_args)


def _check_carried(metadata: ModelMetadata) -> None:
    """Check what a checkpoint carries.

    It is: `classes`, the names by label - 1; `category_ids`, theirs in the data; `input`, mean and
    standard deviation of the colours; `shorter_side` and `longer_side` of the images in pixels;
    `ids_in_names`, whether files are named by their images' ids.
    """
    carried = metadata.carried
    count = metadata.model_args["num_classes"]
    check_texts("classes", carried["classes"], count)
    check_whole_numbers("category_ids", carried["category_ids"], count)
    if len(set(carried["category_ids"])) != count:
        raise ValueError("category_ids has one twice")
    for name in ("shorter_side", "longer_side"):
        check_number(name, carried[name], SIDE, whole=True)
    check_statistics(carried["input"])
    if not isinstance(carried["ids_in_names"], bool):
        raise TypeError("ids_in_names is not true or false")
