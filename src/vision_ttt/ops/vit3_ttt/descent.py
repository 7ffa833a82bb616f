"""The common part of both inner models: the loss's scale, the clipped step and its precision."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from vision_ttt.ops._backend import autocast_kind

LOSS_SCALE = 1 / 3
"""The released models' factor of the dot product loss: 9^-½ for heads of any width."""


def softly_clipped(gradient: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    """gradient / (‖gradient‖₂ + 1), the norm over ``dims``: of length < 1, its direction kept."""
    # The derivative of vector_norm at zero is defined as zero, so a zero gradient gives no NaN.
    return gradient / (torch.linalg.vector_norm(gradient, dim=dims, keepdim=True) + 1)


def at_least_float32(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in float32, or in their own precision where that is higher."""
    return tuple(x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors)


def without_autocast(x: Tensor) -> AbstractContextManager[None]:
    """Disable autocast: sums over all tokens exceed the range of half precisions."""
    kind = autocast_kind(x)
    if torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()
