"""What a diffusion process is, whichever its objective."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vision_ttt.diffusion.flow import FlowMatching
from vision_ttt.diffusion.noise import NoisePrediction

OBJECTIVES = {"noise": NoisePrediction, "flow": FlowMatching}
"""What a model learns to predict → the process."""


Process = NoisePrediction | FlowMatching
"""How images become noise, what a model learns of it, and the way back."""


def make_process(objective: str = "noise", **options: Any) -> Process:
    """The process of an objective.

    Args:
        objective: "noise" (:class:`NoisePrediction`) or "flow" (:class:`FlowMatching`).
        options: arguments of the process: schedule and steps of noise prediction.

    Raises:
        ValueError: an unknown objective; an option is out of its range.
        TypeError: an option that the process does not have.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"objective is {objective!r}; accepted: {', '.join(OBJECTIVES)}")
    return OBJECTIVES[objective](**options)


def draw(images: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Random places [B], evenly from 0 to below 1, and noise [B, C, H, W] for images.

    With a generator, both are drawn on its device and then moved; in float32, whatever the default.
    """
    device = images.device if generator is None else generator.device
    options = {"generator": generator, "device": device, "dtype": torch.float32}
    places = torch.rand(len(images), **options)
    noise = torch.randn(images.shape, **options)
    return places.to(images.device), noise.to(images.device, images.dtype)
