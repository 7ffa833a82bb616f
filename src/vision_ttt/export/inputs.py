"""The batches of images that an exported model accepts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from vision_ttt.engine import ConfigError, ModelMetadata
from vision_ttt.engine.building import build_model
from vision_ttt.errors import UserError
from vision_ttt.models.image_size import size_multiple


class ExportError(UserError, ValueError):
    """A model that cannot be exported as requested, or whose export computes other logits."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the error's name if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@dataclass(frozen=True)
class InputShapes:
    """The fixed and the dynamic sizes of the images [B, C, H, W] that an exported model accepts."""

    channels: int
    """C."""
    height: int
    """The model's own H, in pixels."""
    width: int
    """The model's own W, in pixels."""
    batch_size: int | None = None
    """B; None for any B."""
    multiple: int | None = None
    """If given, H and W may be any multiples of it, in pixels, from twice its value up. None for
    the model's own size only."""
    mini_batch_size: int = 1
    """The largest number of tokens that the model learns from at once."""

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.batch_size < 1:
            raise ExportError(f"batch_size is {self.batch_size}; it must be at least 1")
        step = self.multiple or 1
        if self.height % step or self.width % step:
            raise ExportError(
                f"the model's own size, {self.height} × {self.width}, is no multiple of {step} "
                "pixels, as dynamic sizes must be; export it for its own size"
            )

    @classmethod
    def of(
        cls,
        model: nn.Module,
        input_size: Sequence[int],
        *,
        batch_size: int | None = None,
        dynamic_size: bool = False,
    ) -> InputShapes:
        """The shapes for a model whose own images are ``input_size`` = (C, H, W)."""
        multiple = size_multiple(model) if dynamic_size else None
        learnt = max((getattr(m, "mini_batch_size", 1) for m in model.modules()), default=1)
        return cls(*input_size, batch_size, multiple, learnt)

    def example(self) -> Tensor:
        """Images to trace with. Dynamic axes have sizes that differ from all others.

        That is, 2 images of another size than the model's own, for which its code may have a
        shortcut, and of more tokens than a mini-batch: a loop that is traced with a single step
        has no other number of steps.
        """
        size = self.height, self.width
        if self.multiple is not None:
            step = self.multiple
            height, width = self.height + 2 * step, self.width + step
            while (height // step) * (width // step) <= self.mini_batch_size:
                height += step
            size = height, width
        return torch.zeros(self.batch_size or 2, self.channels, *size)

    def dynamic_axes(self) -> dict[int, Any]:
        """The dynamic axes in the form that ``torch.export`` expects."""
        axes: dict[int, Any] = {}
        if self.batch_size is None:
            axes[0] = Dim("batch", min=1)
        if self.multiple is not None:
            axes[2] = self.multiple * Dim("rows", min=2)
            axes[3] = self.multiple * Dim("columns", min=2)
        return axes

    def to_verify(self) -> list[tuple[int, int, int, int]]:
        """Shapes to verify the exported model with: ends and middle of the dynamic ranges."""
        sizes = [(self.height, self.width)]
        if self.multiple is not None:
            step = self.multiple
            sizes += [
                (2 * step, 2 * step),
                (self.height + step, 3 * step),  # neither square nor a whole mini-batch
                (self.height, self.width + 2 * step),
                (2 * self.height, 2 * self.width),
            ]
        batches = (1, 3) if self.batch_size is None else (self.batch_size,)
        return [(batch, self.channels, *size) for size in sizes for batch in batches]


def accepting_any_size(model: nn.Module, metadata: ModelMetadata) -> nn.Module:
    """Return a model for images of any size: itself, or one with ``dynamic_img_size``.

    Raises:
        ExportError: the architecture supports images of one size only.
    """
    if _runs_at_other_sizes(model, metadata):
        return model
    try:
        other = build_model(metadata.model, {**metadata.model_args, "dynamic_img_size": True})
    except ConfigError as error:
        raise ExportError(f"{metadata.model} supports images of one size only: {error}") from error
    other.load_state_dict(model.state_dict())
    other.eval()
    if not _runs_at_other_sizes(other, metadata):
        raise ExportError(f"{metadata.model} supports images of one size only")
    return other


def _runs_at_other_sizes(model: nn.Module, metadata: ModelMetadata) -> bool:
    shapes = InputShapes.of(model, metadata.carried["input"]["input_size"], dynamic_size=True)
    try:
        with torch.inference_mode():
            model(shapes.example())
    except (ValueError, RuntimeError, AssertionError):  # the errors of models, torch and timm
        return False
    return True
