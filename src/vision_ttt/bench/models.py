"""The measurement of whole models: inference and training steps against the resolution."""

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
from vision_ttt.freed_memory import keep_freed_memory


def steps_of_models(contenders: int, resolutions: int, repeats: int) -> int:
    """The most calls of `advance` by :func:`measure_models`: warm-up, repeats, memory of each."""
    return contenders * resolutions * (repeats + 2)


@functools.cache
def multiply_adds(contender: Contender, resolution: int) -> int:
    """Count the multiply-adds of a contender on one image, on the meta device.

    Raises:
        ConfigError: the contender cannot be built for that size or does not support such images.
    """
    with torch.device("meta"):
        model = contender.build(resolution)
        try:
            return count_macs(model, (3, resolution, resolution))
        except (ValueError, AssertionError, RuntimeError) as error:
            raise ConfigError(
                f"{contender.label} does not support images of {resolution}² pixels: {error}"
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

    Inference is a forward pass in evaluation mode, with weights and images in the given dtype, as
    in a deployment; autocast would cast the weights at every call. A training step is the forward
    and backward pass of the cross-entropy in training mode, with float32 weights under autocast to
    the dtype, without an optimiser. Its memory includes the gradients. On a CPU the process keeps
    what a call frees, so that none waits for memory that another call returned to the system.

    A deployed model receives images in float32, for any dtype that it computes in. Its logits are
    compared with those of the modules before it is timed. Modules first run one image, to record
    their fused kernels. Not timed are a contender whose label promises fused attention and that
    runs none, one whose runtime is missing or computes other logits, and one that runs out of
    memory or of time. The latter is not measured again at that size or above. The row has the
    reason.

    Yields:
        The rows of one resolution, one per contender.

    Raises:
        ConfigError: see :func:`multiply_adds`.
    """
    if settings.device.type == "cpu":
        keep_freed_memory()
    dropouts = Dropouts()
    for resolution in resolutions:
        # Code compiled for earlier resolutions would count against PyTorch's recompilation limit.
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
        timings = interleave(
            {label: entrant.prepare for label, entrant in entrants.items()},
            settings,
            failed={label: entrant.failure for label, entrant in entrants.items()},
            advance=advance,
        )
        rows = []
        for contender in contenders:
            label = contender.label
            make = functools.partial(build, contender, resolution, settings, train)
            prepare = entrants[label].prepare
            timing, memory = _measure_memory(prepare, make, settings, timings[label])
            if timing.failure:
                dropouts.add(label, resolution, f"{resolution}²", timing.failure)
            rows.append(
                Row(
                    what="train" if train else "models",
                    contender=label,
                    measured="training step" if train else "inference",
                    resolution=resolution,
                    batch_size=settings.batch_size,
                    device=settings.device.type,
                    dtype=settings.dtype_name,
                    compiled=settings.compiled,
                    seconds=timing.seconds,
                    seconds_spread=timing.spread,
                    repeats=settings.repeats,
                    macs=multiply_adds(contender, resolution),
                    peak_bytes=memory.peak,
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
    prepare: Prepare | None, make: Callable[[], Prepare], settings: Settings, timing: Timing
) -> tuple[Timing, Memory]:
    """Measure memory: on a CPU in fresh processes, on CUDA in this one."""
    if timing.failure:
        return timing, Memory()
    if settings.device.type == "cuda":
        timing, peak = measure_memory(prepare, settings.device, timing)
        return timing, Memory(peak)
    memory, failure = memory_in_processes(make, settings.device, runs=settings.memory_runs)
    return (Timing(None, None, failure) if failure else timing), memory
