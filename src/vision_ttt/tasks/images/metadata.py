"""What the checkpoints of tasks on images carry: classes and input."""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from vision_ttt.engine.building import build_model
from vision_ttt.engine.checkpoint import ModelMetadata
from vision_ttt.engine.described import (
    check_number,
    check_numbers,
    check_texts,
    check_whole_numbers,
)
from vision_ttt.engine.section import FRACTION, Range, Section
from vision_ttt.errors import UserError
from vision_ttt.tasks.images.models import check_accepts, data_config

_Data = TypeVar("_Data", bound=Section)
SIDE = Range(1, 16_384, "from 1 to 16,384")
"""Pixels; beyond it metadata is damaged rather than ambitious."""
_MOST_PIXELS = 100_000_000  # of an image before the crop; Pillow makes none of twice as many
_LEVEL = Range(-1e6, 1e6, "from -1,000,000 to 1,000,000")
_DEVIATION = Range(1e-6, 1e6, "from 0.000001 to 1,000,000")
_WORDS = {
    "interpolation": ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"),
    "crop_mode": ("center", "squash", "border"),
}
"""What timm's transforms accept."""


def _check_carried(metadata: ModelMetadata) -> dict[str, Any]:
    carried = metadata.carried
    check_texts("classes", carried["classes"], metadata.model_args["num_classes"])
    values = carried["input"]
    size = values["input_size"]
    check_whole_numbers("input_size", size, 3)
    for place, side in enumerate(size):
        check_number(f"input_size[{place}]", side, SIDE, whole=True)
    check_statistics(values, size[0])
    for name, accepted in _WORDS.items():
        if values[name] not in accepted:
            raise ValueError(f"{name} is {values[name]!r}; accepted are {', '.join(accepted)}")
    check_number("crop_pct", values["crop_pct"], FRACTION)
    if size[1] * size[2] / values["crop_pct"] ** 2 > _MOST_PIXELS:
        raise ValueError(
            f"crop_pct is {values['crop_pct']}; images of {size[1]} × {size[2]} pixels would be"
            f" cut from ones of more than {_MOST_PIXELS:,}"
        )
    return carried


def check_statistics(given: Mapping[str, Any], channels: int = 3) -> None:
    """Check the mean and the standard deviation of the colours.

    Raises:
        ValueError, TypeError, KeyError: they are not those of so many channels.
    """
    check_numbers("mean", given["mean"], channels, _LEVEL)
    check_numbers("std", given["std"], channels, _DEVIATION)


def rebuild(metadata: ModelMetadata) -> nn.Module:
    """Build the model that a checkpoint describes, randomly initialised.

    Raises:
        ValueError, TypeError, KeyError: the description is damaged.
    """
    carried = _check_carried(metadata)
    model = build_model(metadata.model, metadata.model_args)
    size = list(carried["input"]["input_size"])
    # Its usual size needs no look.
    if "img_size" in metadata.model_args or list(data_config(model)["input_size"]) != size:
        check_accepts(model, torch.zeros(1, *size))
    return model


def described_data(kind: type[_Data], data: Mapping[str, Any], *, root: str) -> _Data:
    """Return the section `data` that a checkpoint describes.

    Args:
        root: the field that says where the data are.

    Raises:
        UserError: that field is missing, or there is one that the section does not have.
    """
    if root not in data:
        raise UserError("the checkpoint does not name its data; give --dataset")
    try:
        return kind(**data)
    except TypeError as error:  # of another version, or damaged
        raise UserError(f"the checkpoint's data: {error}; give --dataset") from error
