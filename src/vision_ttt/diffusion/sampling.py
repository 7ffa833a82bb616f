"""New images from noise, by class."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from timm.layers import to_2tuple
from torch import Tensor

from vision_ttt.diffusion.noise import NoisePrediction, Solver
from vision_ttt.diffusion.process import Process
from vision_ttt.models.dit3 import DiT3, check_labels

_STEPS = 50


@torch.no_grad()
def sample(
    model: DiT3,
    process: Process,
    labels: Tensor,
    *,
    size: int | tuple[int, int] | None = None,
    sampler: str | None = None,
    steps: int | None = None,
    guidance: float = 1.0,
    seed: int = 0,
    clip: bool = True,
    batch_size: int = 100,
    advance: Callable[[int], None] = lambda _images: None,
) -> Tensor:
    """Generate an image for each label.

    An image follows from the seed and its place in ``labels``: its neighbours and the batch size
    change nothing but its rounding.

    Args:
        model: in evaluation mode.
        process: the one it was trained by.
        labels: classes [N], int64; ``model.num_classes`` for none.
        size: height and width, or one number for both; the model's own by default.
        sampler: one of ``process.samplers``; the first by default.
        steps: how many times the model is called; by default 50, or T of a process with fewer.
        guidance: s of e∅ + s (e_y - e∅), with e∅ the model's answer for no class: 1 is the class's
            own answer, at half the cost of any other.
        seed: of all noise, at least 0.
        clip: keep predicted images within -1 and 1: right for pixels, wrong for latents.
        batch_size: images at once.
        advance: called after each step with its number of images.

    Returns:
        [N, C, H, W] float32 on the CPU.

    Raises:
        ValueError: labels, size, sampler, steps, guidance, seed or batch size do not fit.
    """
    _check(model, labels, guidance, seed)
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    steps = default_steps(process) if steps is None else steps
    device = next(model.parameters()).device
    shape = (model.in_channels, *to_2tuple(size or model.input_size))
    drawn = {"device": "cpu", "dtype": torch.float32}
    made = []
    for start in range(0, len(labels), batch_size):
        own = labels[start : start + batch_size]
        generators = [generator(seed, start + place) for place in range(len(own))]
        x = torch.stack([torch.randn(shape, generator=each, **drawn) for each in generators])
        x = x.to(device)
        solver = process.solver(
            sampler or process.samplers[0], steps, clip=clip, learned_variances=model.learn_sigma
        )
        x = _denoise(x, own.to(device), model, solver, guidance, generators, advance)
        made.append(x.cpu())
    return torch.cat(made) if made else torch.empty(0, *shape, **drawn)


def default_steps(process: Process) -> int:
    """Return 50, or T of a process with fewer steps."""
    return min(_STEPS, process.steps) if isinstance(process, NoisePrediction) else _STEPS


def generator(seed: int, place: int) -> torch.Generator:
    """The generator of one image's noise."""
    state = np.random.SeedSequence((seed, place)).generate_state(1, np.uint64)[0]
    return torch.Generator("cpu").manual_seed(int(state >> 1))  # 63 bits: torch's are signed


def _denoise(
    x: Tensor,
    labels: Tensor,
    model: DiT3,
    solver: Solver,
    guidance: float,
    generators: Sequence[torch.Generator],
    advance: Callable[[int], None],
) -> Tensor:
    none = torch.full_like(labels, model.num_classes)
    dtype = next(model.parameters()).dtype
    for number, time in enumerate(solver.times):
        times = torch.full((len(x),), time, device=x.device, dtype=torch.float32)
        if guidance == 1:
            answer = model(x.to(dtype), times, labels)
        else:
            answer = model.forward_with_cfg(
                torch.cat((x, x)).to(dtype),
                torch.cat((times, times)),
                torch.cat((labels, none)),
                guidance,
                guided_channels=model.in_channels,
            )[: len(x)]
        x = solver.step(number, answer.float(), x, list(generators))
        advance(len(x))
    return x


def _check(model: DiT3, labels: Tensor, guidance: float, seed: int) -> None:
    if labels.ndim != 1:
        raise ValueError(f"labels must be [N], got {list(labels.shape)}")
    # Once for all steps: on a device, the model does not read them.
    check_labels(labels, model.num_classes, model.label_embed.table.num_embeddings)
    if not guidance >= 0 or guidance == float("inf"):
        raise ValueError(f"guidance is {guidance}; it must be at least 0")
    if guidance != 1 and model.label_embed.dropout == 0:
        raise ValueError(
            f"guidance is {guidance}, but the model was made with class_dropout_prob=0 and knows "
            "no image without class; 1 is accepted"
        )
    if seed < 0:
        raise ValueError(f"seed is {seed}; it must be at least 0")
