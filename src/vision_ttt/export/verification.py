"""Running an exported model beside the one that it was made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vision_ttt.export.inputs import ExportError

TOLERANCE = 1e-4
"""Largest difference accepted, relative to the largest output; float32's rounding stays below."""


@dataclass(frozen=True)
class Agreement:
    """What was seen when an exported model ran beside its origin."""

    shapes: tuple[tuple[int, ...], ...]
    """Of the batches of images that both ran on."""
    difference: float
    """max |exported - original| / max |original|, the worst over all batches."""


def verify(
    exported: Callable[[Tensor], Tensor],
    model: nn.Module,
    shapes: Sequence[tuple[int, ...]],
    name: str,
    tolerance: float = TOLERANCE,
) -> Agreement:
    """Compare an exported model with ``model`` on random images of several shapes.

    Raises:
        ExportError: outputs differ by more than ``tolerance``, or in shape, or the exported model
            fails; names where.
    """
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for shape in shapes:
        images = torch.randn(shape, generator=generator)
        with torch.inference_mode():
            wanted = model(images)
            got = _run(exported, images, name)
        if got.shape != wanted.shape:
            raise ExportError(
                f"{name} gives {list(got.shape)} for images {list(shape)}, the model "
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
    except Exception as error:  # of whatever runtime
        reason = str(error).strip().splitlines()[0]
        raise ExportError(
            f"{name} fails on images {list(images.shape)}: {reason}; nothing was written"
        ) from error
