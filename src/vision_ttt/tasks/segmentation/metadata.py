"""What the checkpoints of segmenters carry: classes, their colours, and how images are shown."""

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from vision_ttt.dense.building import build_segmenter
from vision_ttt.engine.checkpoint import ModelMetadata
from vision_ttt.tasks.segmentation.config import SegmentationData

INPUT = ("longer_side", "test_shorter_side", "evaluation", "window", "stride")
"""The fields of `SegmentationData` that say how a model sees images at test."""


def check_carried(metadata: ModelMetadata) -> dict[str, Any]:
    """Return what a checkpoint carries, checked.

    Raises:
        ValueError, TypeError, KeyError: it is damaged.
    """
    told = metadata.carried
    classes, colours = told["classes"], told["palette"]
    if not all(isinstance(name, str) for name in classes):
        raise TypeError("classes are no names")
    if not metadata.model_args["num_classes"] == len(classes) == len(colours):
        raise ValueError("the number of classes does not fit")
    for colour in colours:
        if len(colour) != 3 or not all(isinstance(n, int) and 0 <= n <= 255 for n in colour):
            raise ValueError(f"palette has {colour}; a colour is three numbers from 0 to 255")
    check_statistics(told["input"])
    shown = {name: told["input"][name] for name in INPUT}
    SegmentationData(**shown, shorter_side=shown["test_shorter_side"])  # checks them
    return told


def check_statistics(given: Mapping[str, Any]) -> None:
    """Raise ValueError, TypeError or KeyError unless mean and std are three numbers each."""
    for name in ("mean", "std"):
        numbers = [float(each) for each in given[name]]
        low = 0.0 if name == "std" else -math.inf
        if len(numbers) != 3 or not all(math.isfinite(n) and n > low for n in numbers):
            raise ValueError(f"{name} {given[name]} is not that of three channels")


def rebuild(metadata: ModelMetadata) -> nn.Module:
    """Build the model that a checkpoint describes, randomly initialised.

    Raises:
        ValueError, TypeError, KeyError: the description is damaged.
    """
    check_carried(metadata)
    return build_segmenter(metadata.model, **metadata.model_args)
