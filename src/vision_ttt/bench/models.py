"""Whole models: inference and training steps against the resolution."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch

from vision_ttt.bench.complexity import count_macs
from vision_ttt.bench.contenders import Contender
from vision_ttt.bench.entrants import build, enter
from vision_ttt.bench.memory import Memory, measure_memory, memory_in_processes
from vision_ttt.bench.protocol import Advance, Dropouts, Prepare, Settings, Timing, interleave
from vision_ttt.bench.rows import Row, Run
from vision_ttt.engine.config import ConfigError


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

    A deployed model takes images in float32, whatever it computes in; its logits are compared with
    those of the modules before it is timed. Modules first run one image, to see which fused kernels
    serve them; a contender whose label promises fused attention and that runs none is not timed.
    Neither is one whose runtime is missing or computes something else, nor one that gets no memory
    or takes too long, nor is it tried again at that size or above. The row says why.

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
            contender.label: enter(
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
            timing, memory = timings[label], Memory()
            if label in ready:
                make = functools.partial(build, contender, resolution, settings, train)
                timing, memory = _measure_memory(ready[label], make, settings, timing)
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
                    peak_bytes=memory.peak,
                    matmul_macs_per_second=None,
                    run=run,
                    autocast=train and settings.dtype != torch.float32,
                    kernels=", ".join(entrants[label].kernels),
                    failure=timing.failure,
                    held_bytes=memory.held,
                    memory_runs=0 if memory.held is None else settings.memory_runs,
                )
            )
            advance(label)
        yield rows


def _measure_memory(
    prepare: Prepare, make: Callable[[], Prepare], settings: Settings, timing: Timing
) -> tuple[Timing, Memory]:
    """On a CPU in fresh processes, on CUDA of the very contender that was timed."""
    if timing.failure:
        return timing, Memory()
    if settings.device.type == "cuda":
        timing, peak = measure_memory(prepare, settings.device, timing)
        return timing, Memory(peak)
    memory, failure = memory_in_processes(make, settings.device, runs=settings.memory_runs)
    return (Timing(None, None, failure) if failure else timing), memory
