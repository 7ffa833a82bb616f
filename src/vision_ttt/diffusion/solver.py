"""One of diffusers' schedulers on its way from noise to images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Predict = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(noisy images [B, C, H, W], times [B], labels [B]) → what a model says, [B, C or 2 C, H, W]."""


class Solver(NamedTuple):
    """Steps from noise to images; it goes through them once."""

    times: Sequence[float]
    """The time that the model receives at each step, from noise to images."""
    step: Callable[[int, Tensor, Tensor, list[torch.Generator]], Tensor]
    """(number of the step, the model's answer, noisy images [B, C, H, W], a generator for each
    image) → less noisy images."""
