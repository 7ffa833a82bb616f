"""Diffusion by noise prediction: DDPM's objective, its learned variances, DDPM and DDIM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from diffusers import DDIMScheduler, DDPMScheduler
from torch import Tensor

from vision_ttt.diffusion.variational import bits_per_dimension

BOUND_WEIGHT = 1e-3
"""λ of the hybrid loss (Improved DDPM, Sec. 3.1)."""
_ON_CPU = torch.device("cpu")  # diffusers' schedulers would use PyTorch's default device
SCHEDULES = {"linear": "linear", "cosine": "squaredcos_cap_v2"}
"""Our name of a noise schedule → diffusers' one."""


Predict = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(noisy images [B, C, H, W], times [B], labels [B]) → what a model says, [B, C or 2 C, H, W]."""


class Solver(NamedTuple):
    """The steps from noise to images, of one pass."""

    times: Sequence[float]
    """The time that the model receives at each step, from noise to images."""
    step: Callable[[int, Tensor, Tensor, list[torch.Generator]], Tensor]
    """(number of the step, the model's answer, noisy images [B, C, H, W], a generator for each
    image) → less noisy images."""


class NoisePrediction:
    """x_t = √ᾱ_t x₀ + √(1 - ᾱ_t) ε in T steps; a model predicts ε (DDPM, Eqs. 4 and 14).

    A model of 2 C channels predicts the variances of the reverse steps, too, and learns them by the
    variational bound (Improved DDPM, Eq. 16)::

        L = ‖ε - ε_θ(x_t, t)‖² / (C H W) + λ T L_vb(t),    λ = 0.001

    in whose bound ε_θ is held fixed; T = 1000 makes this the released DiT's loss.

    Args:
        schedule: "linear" (DDPM's: β from 1e-4 to 0.02 at T = 1000, and scaled for other T) or
            "cosine" (Improved DDPM, Eq. 17).
        steps: T.

    Raises:
        ValueError: an unknown schedule; fewer than two steps.
    """

    samplers = ("ddim", "ddpm")

    def __init__(self, schedule: str = "linear", steps: int = 1000) -> None:
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule is {schedule!r}; accepted: {', '.join(SCHEDULES)}")
        if steps < 2:
            raise ValueError(f"steps is {steps}; it must be at least 2")
        self.schedule = schedule
        self.steps = steps
        scale = 1000 / steps
        with _ON_CPU:
            self.scheduler = DDPMScheduler(
                num_train_timesteps=steps,
                beta_schedule=SCHEDULES[schedule],
                beta_start=min(1e-4 * scale, 0.999),
                beta_end=min(0.02 * scale, 0.999),
            )

    def describe(self) -> dict[str, Any]:
        """The arguments of :func:`vision_ttt.diffusion.make_process` that make this process."""
        return {"objective": "noise", "schedule": self.schedule, "steps": self.steps}

    def losses(
        self, predict: Predict, images: Tensor, labels: Tensor, places: Tensor, noise: Tensor
    ) -> Tensor:
        """L of each image [B].

        Args:
            predict: the model.
            images: x₀ [B, C, H, W], pixels from -1 to 1.
            labels: classes [B].
            places: t / T [B], from 0 to below 1.
            noise: ε [B, C, H, W].

        Raises:
            ValueError: the model's answer has neither C nor 2 C channels.
        """
        channels = images.shape[1]
        times = (places * self.steps).long()
        noisy = self.scheduler.add_noise(images, noise, times)
        answer = predict(noisy, times, labels).float()
        if answer.shape[1] not in (channels, 2 * channels):
            raise ValueError(
                f"a model of noise in {channels} channels answers with {channels} or "
                f"{2 * channels}, got {list(answer.shape)}"
            )
        predicted, variances = answer[:, :channels], answer[:, channels:]
        losses = (noise - predicted).square().flatten(1).mean(1)
        if variances.shape[1]:
            bound = bits_per_dimension(
                images, noisy, times, predicted.detach(), variances, self.scheduler.alphas_cumprod
            )
            losses = losses + BOUND_WEIGHT * self.steps * bound
        return losses

    def solver(self, sampler: str, steps: int, *, clip: bool, learned_variances: bool) -> Solver:
        """Some of the T steps backwards, evenly spread, as a process of so many steps by itself.

        Its betas are those that lead from one kept ᾱ to the next (Improved DDPM, Eq. 19).

        Args:
            sampler: "ddim" (η = 0: only the first noise is random) or "ddpm" (each step is).
            steps: from 1 to T.
            clip: keep the predicted x₀ within -1 and 1, where pixels are.
            learned_variances: the model has 2 C channels; DDIM does without the second half.

        Raises:
            ValueError: an unknown sampler, or more steps than T.
        """
        if sampler not in self.samplers:
            raise ValueError(f"sampler is {sampler!r}; accepted: {', '.join(self.samplers)}")
        if not 1 <= steps <= self.steps:
            raise ValueError(f"steps is {steps}; accepted: 1 to {self.steps}")
        with _ON_CPU:
            kept = torch.linspace(self.steps - 1, 0, steps, dtype=torch.float64)
            kept = kept.round().long().flip(0)
            if sampler == "ddim":
                scheduler = DDIMScheduler(steps, clip_sample=clip)
            else:
                kind = "learned_range" if learned_variances else "fixed_small"
                scheduler = DDPMScheduler(steps, clip_sample=clip, variance_type=kind)
        # Both step by ᾱ alone. By way of betas its last digits would be lost where it is small.
        # Training moves ᾱ to its device; on the CPU it goes with images on any.
        scheduler.alphas_cumprod = self.scheduler.alphas_cumprod.cpu()[kept]
        scheduler.set_timesteps(steps)
        numbers: Sequence[int] = scheduler.timesteps.tolist()  # steps - 1 … 0

        def step(
            number: int, answer: Tensor, noisy: Tensor, generators: list[torch.Generator]
        ) -> Tensor:
            if sampler == "ddim":
                answer = answer[:, : noisy.shape[1]]
            return scheduler.step(answer, numbers[number], noisy, generator=generators).prev_sample

        return Solver([float(kept[number]) for number in numbers], step)
