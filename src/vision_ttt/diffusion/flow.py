"""Diffusion by flow matching: straight paths from noise to images."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from vision_ttt.diffusion.noise import Predict, Solver

TIME_SCALE = 1000
"""The model receives 1000 σ, times of the range of noise prediction's."""


class FlowMatching:
    """x_σ = (1 - σ) x₀ + σ ε for σ in [0, 1]; a model predicts the velocity ε - x₀.

    Flow Matching (Lipman et al., Eqs. 20 and 23, time reversed) with straight paths, as rectified
    flow has them. Sampling goes from σ = 1 to 0 by Euler's steps.
    """

    samplers = ("euler",)

    def describe(self) -> dict[str, Any]:
        """The arguments of :func:`vision_ttt.diffusion.make_process` that make this process."""
        return {"objective": "flow"}

    def losses(
        self, predict: Predict, images: Tensor, labels: Tensor, places: Tensor, noise: Tensor
    ) -> Tensor:
        """‖ε - x₀ - v_θ(x_σ, σ)‖² / (C H W) of each image [B]; `places` are σ, from 0 to below 1.

        Raises:
            ValueError: the model's answer has not C channels.
        """
        sigma = places.to(images.dtype).view(-1, 1, 1, 1)
        noisy = (1 - sigma) * images + sigma * noise
        answer = predict(noisy, TIME_SCALE * places, labels).float()
        if answer.shape != images.shape:
            raise ValueError(
                f"a model of velocities answers with {images.shape[1]} channels, got "
                f"{list(answer.shape)}; make it with learn_sigma=False"
            )
        return (noise - images - answer).square().flatten(1).mean(1)

    def solver(self, sampler: str, steps: int, *, clip: bool, learned_variances: bool) -> Solver:
        """Euler's steps, of equal lengths in σ; arguments as of `NoisePrediction.solver`.

        `clip` is ignored: a velocity gives no x₀ to clip.

        Raises:
            ValueError: an unknown sampler; no step; learned variances.
        """
        if sampler not in self.samplers:
            raise ValueError(f"sampler is {sampler!r}; accepted: {', '.join(self.samplers)}")
        if steps < 1:
            raise ValueError(f"steps is {steps}; it must be at least 1")
        if learned_variances:
            raise ValueError(
                "flow matching has no variances; make the model with learn_sigma=False"
            )
        scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=TIME_SCALE)
        scheduler.set_timesteps(steps, sigmas=np.linspace(1, 1 / steps, steps))

        def step(
            number: int, answer: Tensor, noisy: Tensor, generators: list[torch.Generator]
        ) -> Tensor:
            return scheduler.step(answer, scheduler.timesteps[number], noisy).prev_sample

        return Solver(scheduler.timesteps.tolist(), step)
