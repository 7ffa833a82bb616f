"""Verification of an exported model against the original one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vision_ttt.errors import DamagedModel
from vision_ttt.export.inputs import ExportError, first_line

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""The largest accepted difference, relative to the largest output, by the dtype of products. Its
rounding errors are smaller."""


@dataclass(frozen=True)
class Agreement:
    """The result of a verification."""

    shapes: tuple[tuple[int, ...], ...]
    """The shapes of the compared batches of images."""
    difference: float
    """max |exported - original| / max |original|, the largest over all batches."""


def verify(
    exported: Callable[[Tensor], Tensor],
    model: nn.Module,
    shapes: Sequence[tuple[int, ...]],
    name: str,
    tolerance: float = TOLERANCES[torch.float32],
) -> Agreement:
    """Compare an exported model with ``model`` on random images of several shapes.

    Raises:
        DamagedModel: the model computes NaN or infinity.
        ExportError: outputs differ by more than ``tolerance``, or in shape, or one of the models
            fails. The message has the images' shape.
    """
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for shape in shapes:
        images = torch.randn(shape, generator=generator)
        with torch.inference_mode():
            wanted = _run(model, images, "the model")
            if not wanted.isfinite().all():
                raise DamagedModel(
                    f"the model predicts NaN for images {list(shape)}: its weights are damaged;"
                    " nothing was written"
                )
            got = _run(exported, images, name)
        if got.shape != wanted.shape:
            raise ExportError(
                f"{name} returns {list(got.shape)} for images {list(shape)}, the model "
                f"{list(wanted.shape)}; nothing was written"
            )
        difference = ((got - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12)).item()
        if not difference <= tolerance:  # NaN, too
            raise ExportError(
                f"{name} differs from the model by {difference:.1e} of the largest output on images"
                f" {list(shape)}, more than {tolerance:g}; nothing was written"
            )
        worst = max(worst, difference)
    return Agreement(tuple(shapes), worst)


def _run(exported: Callable[[Tensor], Tensor], images: Tensor, name: str) -> Tensor:
    try:
        return exported(images)
    except Exception as error:  # the error of any runtime
        raise ExportError(
            f"{name} fails on images {list(images.shape)}: {first_line(error)}; nothing was written"
        ) from error
