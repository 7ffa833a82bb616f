"""How long an update of each of several runs takes, measured in turns in one process."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping

import torch

from vision_ttt.bench.protocol import Settings, interleave
from vision_ttt.engine import TrainConfig
from vision_ttt.engine.assembly import assemble
from vision_ttt.engine.parallel import make_accelerator
from vision_ttt.engine.task import Moment
from vision_ttt.errors import UserError

_LOGGER = logging.getLogger(__name__)
REPEATS = 5


def measure_paces(
    configs: Mapping[str, TrainConfig], *, repeats: int = REPEATS
) -> dict[str, float]:
    """Run's name → seconds of an update with one thread, the median of `repeats`.

    The runs make real updates in turns, so that a machine that slows down slows all of them. Each
    repeats its first batch, whose reading is not timed. Nothing else should run.

    Args:
        configs: of the runs; their output folders are not written to.
        repeats: samples of each run.

    Raises:
        UserError: an update failed for lack of memory; names the run.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        updates = {name: updates_of(config) for name, config in configs.items()}
        timings = interleave(
            {name: (lambda update=update: update) for name, update in updates.items()},
            Settings(torch.device("cpu"), repeats=repeats),
        )
    finally:
        torch.set_num_threads(threads)
    for name, timing in timings.items():
        if timing.seconds is None:
            raise UserError(f"the pace of {name} cannot be measured: {timing.failure}")
        _LOGGER.info("%s: %.3f s an update", name, timing.seconds)
    return {name: timing.seconds for name, timing in timings.items()}


def cpu_seconds_of_an_update(config: TrainConfig, *, repeats: int = 20) -> float:
    """The median CPU time of a run's updates, which other processes at work hardly change.

    As for :func:`measure_paces`, batches are not read within the time.
    """
    update = updates_of(config)
    update()
    times = []
    for _ in range(repeats):
        started = time.process_time()
        update()
        times.append(time.process_time() - started)
    return statistics.median(times)


def updates_of(config: TrainConfig) -> Callable[[], object]:
    """What makes an update of a run, its first one again and again."""
    accelerator = make_accelerator(config.optimisation.accumulation_steps)
    parts = assemble(config, accelerator, [], lambda: 0.0)
    parts.model.train()
    parts.scheduler.step_update(int(parts.length.warmup))
    batches = next(parts.loaders.updates(0, 0))
    moment = Moment(0.0, None if parts.average is None else parts.average.module)
    return lambda: parts.step(batches, 0, 0, moment)
