"""The part of the section `task` that detection and segmentation share: the dense model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vision_ttt.engine.config import TaskSection
from vision_ttt.errors import UserError


@dataclass(frozen=True)
class DenseSection(TaskSection):
    """A task whose model is a backbone, maps around it, and heads on these."""

    maps: Literal["adapter", "pyramid", "stages"] = "adapter"
    """Where the maps at strides 4 to 32 come from: a ViT-Adapter around a plain backbone, whose
    blocks have one resolution, or a pyramid resampled from four of its depths, or the stages of a
    hierarchical one."""
    parts: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further sizes of the model around the backbone, e.g. --parts.channels 64, as in `dense` of
    vision_ttt.dense.build_detector and build_segmenter; the published ones where left out."""
    partial_weights: bool = False
    """Start from initial_weights even if they lack tensors of the backbone or have tensors that the
    backbone lacks; the log names them. Otherwise such weights raise an error."""


def check_below_root(data: Any, names: Iterable[str]) -> None:
    """Raise UserError where a path of a section `data` does not change with its root."""
    for name in names:
        path = getattr(data, name)
        if Path(path).is_absolute():
            raise UserError(
                f"dataset replaces the root of the checkpoint's data, but {name} is the absolute"
                f" path {path!r}; it must be relative to the root"
            )
