"""What a detector's checkpoints carry, and the model that they describe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vision_ttt.dense.building import DenseModelError, build_detector
from vision_ttt.dense.detector import Detector
from vision_ttt.engine.checkpoint import ModelMetadata
from vision_ttt.engine.config import ConfigError
from vision_ttt.engine.described import check_number, check_texts, check_whole_numbers
from vision_ttt.tasks.images.metadata import SIDE, check_statistics


def build(name: str, arguments: Mapping[str, Any]) -> Detector:
    """Build the detector of a backbone, randomly initialised.

    Raises:
        ConfigError: there is no such backbone, or an argument that is not accepted.
    """
    try:
        return build_detector(name, **arguments)
    except DenseModelError as error:
        raise ConfigError(str(error)) from error


def rebuild(metadata: ModelMetadata) -> Detector:
    """Build the detector that a checkpoint describes, randomly initialised.

    Raises:
        ValueError, TypeError, KeyError: the description is damaged.
    """
    check_carried(metadata)
    return build(metadata.model, metadata.model_args)


def check_carried(metadata: ModelMetadata) -> dict[str, Any]:
    """Return what a checkpoint carries, checked.

    It is: `classes`, the names by label - 1; `category_ids`, theirs in the data; `input`, mean and
    standard deviation of the colours; `shorter_side` and `longer_side` of the images in pixels;
    `ids_in_names`, whether files are named by their images' ids.

    Raises:
        ValueError, TypeError, KeyError: it is damaged.
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
    return carried
