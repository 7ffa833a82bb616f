"""Whole models: inference and training steps against the resolution."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vision_ttt.bench.complexity import count_macs
from vision_ttt.bench.contenders import NUM_CLASSES, Contender
from vision_ttt.bench.kernels import ATTENTION, kernels_run
from vision_ttt.bench.memory import measure_memory
from vision_ttt.bench.protocol import (
    Advance,
    Dropouts,
    Prepare,
    Settings,
    Timing,
    interleave,
    unless_out_of_memory,
)
from vision_ttt.bench.rows import Row, Run
from vision_ttt.engine.config import ConfigError
from vision_ttt.models.evaluation_mode import evaluation_mode


def steps_of_models(contenders: int, resolutions: int, repeats: int) -> int:
    """How often :func:`measure_models` advances at most: warm-up, repeats and memory of each."""
    return contenders * resolutions * (repeats + 2)


@functools.cache
def multiply_adds(contender: Contender, resolution: int) -> int:
    """Count the multiply-adds of a contender on one image, which computes nothing.

    Raises:
        ConfigError: the contender cannot be built for that size or does not take such images.
    """
    with torch.device("meta"):
        model = contender.build(resolution)
        try:
            return count_macs(model, (3, resolution, resolution))
        except (ValueError, AssertionError, RuntimeError) as error:
            raise ConfigError(
                f"{contender.label} does not take images of {resolution}² pixels: {error}"
            ) from error


def measure_models(
    contenders: Sequence[Contender],
    resolutions: Sequence[int],
    settings: Settings,
    run: Run,
    *,
    train: bool,
    advance: Advance = lambda _name: None,
) -> Iterator[list[Row]]:
    """Measure the contenders against each other, one resolution after the other.

    Inference is a forward pass in evaluation mode, weights and images in the given dtype: what one
    deploys for speed, while autocast would cast the weights at every call. A training step is the
    forward and backward pass of the cross-entropy in training mode, float32 weights under autocast
    to the dtype; no optimiser. Its memory holds the gradients.

    Every contender first runs one image, to see which fused kernels serve it. One whose label
    promises fused attention and that runs none is not timed. Neither is one that gets no memory or
    takes too long, nor is it tried again at that size or above. The row says why.

    Yields:
        The rows of one resolution, one per contender.

    Raises:
        ConfigError: see :func:`multiply_adds`.
    """
    dropouts = Dropouts()
    for resolution in resolutions:
        # Compiled code is per model; what former resolutions left would count against its limit.
        torch.compiler.reset()
        entrants = {
            contender.label: _enter(
                contender,
                resolution,
                settings,
                train,
                dropouts.reason(contender.label, resolution),
            )
            for contender in contenders
        }
        ready = {label: entrant.prepare for label, entrant in entrants.items() if entrant.prepare}
        timings = {
            label: Timing(None, None, entrant.failure) for label, entrant in entrants.items()
        }
        if ready:
            timings |= interleave(
                ready,
                repeats=settings.repeats,
                device=settings.device,
                shortest_repeat=settings.shortest_repeat,
                longest_call=settings.longest_call,
                advance=advance,
            )
        rows = []
        for contender in contenders:
            label = contender.label
            timing, peak = timings[label], None
            if label in ready:
                timing, peak = measure_memory(ready[label], settings.device, timing)
            if timing.failure:
                dropouts.add(label, resolution, f"{resolution}²", timing.failure)
            rows.append(
                Row(
                    what="train" if train else "models",
                    contender=label,
                    measured="training step" if train else "inference",
                    resolution=resolution,
                    tokens=None,
                    heads=None,
                    dim=None,
                    mini_batch_size=None,
                    batch_size=settings.batch_size,
                    device=settings.device.type,
                    dtype=settings.dtype_name,
                    compiled=settings.compiled,
                    seconds=timing.seconds,
                    seconds_spread=timing.spread,
                    repeats=settings.repeats,
                    macs=multiply_adds(contender, resolution),
                    peak_bytes=peak,
                    matmul_macs_per_second=None,
                    run=run,
                    autocast=train and settings.dtype != torch.float32,
                    kernels=", ".join(entrants[label].kernels),
                    failure=timing.failure,
                )
            )
            advance(label)
        yield rows


class _Entrant(NamedTuple):
    """A contender at a size: what prepares its call, or why it is not to be timed."""

    prepare: Prepare | None
    kernels: Sequence[str] = ()
    failure: str = ""


def _enter(
    contender: Contender, resolution: int, settings: Settings, train: bool, failure: str
) -> _Entrant:
    """Build a contender and see which kernels it runs, unless a former failure keeps it out."""
    if failure:
        return _Entrant(None, failure=failure)
    model = contender.build(resolution).to(settings.device).train(train)
    if not train:
        model = model.to(settings.dtype)
    kernels, failure = unless_out_of_memory(lambda: _kernels_of(model, resolution, settings, train))
    if failure:
        return _Entrant(None, failure=failure)
    if contender.fused and not any(name.startswith(ATTENTION) for name in kernels):
        return _Entrant(None, kernels, "no fused attention kernel serves it")
    return _Entrant(_prepare(model, resolution, settings, train), kernels)


def _kernels_of(model: nn.Module, resolution: int, settings: Settings, train: bool) -> list[str]:
    """The kernels that the model runs on one image, with gradients to come where it trains."""
    dtype = torch.float32 if train else settings.dtype
    image = torch.randn(1, 3, resolution, resolution, device=settings.device, dtype=dtype)
    autocast = _autocast(settings.device, settings.dtype, enabled=train)
    with evaluation_mode(model), torch.set_grad_enabled(train), autocast:
        return kernels_run(lambda: model(image))


def _autocast(device: torch.device, dtype: torch.dtype, *, enabled: bool = True) -> torch.autocast:
    return torch.autocast(device.type, dtype=dtype, enabled=enabled and dtype != torch.float32)


def _prepare(model: nn.Module, resolution: int, settings: Settings, train: bool) -> Prepare:
    function = torch.compile(model, dynamic=False) if settings.compiled else model
    shape = (settings.batch_size, 3, resolution, resolution)

    def prepare() -> Callable[[], object]:
        if not train:
            images = torch.randn(shape, device=settings.device, dtype=settings.dtype)
            return functools.partial(_infer, function, images)
        images = torch.randn(shape, device=settings.device)
        labels = torch.randint(NUM_CLASSES, shape[:1], device=settings.device)
        model.zero_grad(set_to_none=True)
        return functools.partial(_step, function, images, labels, settings.dtype)

    return prepare


@torch.inference_mode()
def _infer(model: nn.Module, images: Tensor) -> Tensor:
    return model(images)


def _step(model: nn.Module, images: Tensor, labels: Tensor, dtype: torch.dtype) -> None:
    with _autocast(images.device, dtype):
        loss = F.cross_entropy(model(images).float(), labels)
    loss.backward()
