"""What the checkpoints of tasks on images carry: classes and input."""

import math
from typing import Any

from torch import nn

from vision_ttt.engine.building import build_model
from vision_ttt.engine.checkpoint import ModelMetadata

_LARGEST_SIDE = 16_384  # pixels; beyond it metadata is damaged rather than ambitious


def check_carried(metadata: ModelMetadata) -> dict[str, Any]:
    """Return what a checkpoint carries, checked.

    Raises:
        ValueError, TypeError, KeyError: it is damaged.
    """
    told = metadata.carried
    if metadata.model_args["num_classes"] != len(told["classes"]):
        raise ValueError("the number of classes does not fit")
    values = told["input"]
    size = values["input_size"]
    if len(size) != 3 or not all(isinstance(n, int) and 1 <= n <= _LARGEST_SIDE for n in size):
        raise ValueError(f"input_size {size} is not three numbers from 1 to {_LARGEST_SIDE}")
    for name in ("mean", "std"):
        if not all(math.isfinite(float(number)) for number in values[name]):
            raise ValueError(f"{name} {values[name]} is not finite")
    if not isinstance(values["interpolation"], str):
        raise TypeError("interpolation is not a name")
    if not 0 < float(values["crop_pct"]) <= 1:
        raise ValueError(f"crop_pct {values['crop_pct']} is not in (0, 1]")
    return told


def rebuild(metadata: ModelMetadata) -> nn.Module:
    """Build the model that a checkpoint describes, randomly initialised.

    Raises:
        ValueError, TypeError, KeyError: the description is damaged.
    """
    check_carried(metadata)
    return build_model(metadata.model, metadata.model_args)
