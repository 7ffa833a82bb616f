"""How long an update of each of several runs takes, measured in turns in one process."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping

import torch

from vision_ttt.bench.protocol import unless_out_of_memory
from vision_ttt.engine import TrainConfig
from vision_ttt.engine.assembly import assemble
from vision_ttt.engine.parallel import make_accelerator
from vision_ttt.engine.task import Moment
from vision_ttt.errors import UserError
from vision_ttt.freed_memory import keep_freed_memory

_LOGGER = logging.getLogger(__name__)
REPEATS = 5


def measure_paces(
    configs: Mapping[str, TrainConfig], *, repeats: int = REPEATS
) -> dict[str, float]:
    """Run's name → CPU seconds of an update with one thread, the median of `repeats`.

    The runs make real updates in turns, so that whatever slows the machine slows all of them. CPU
    time does not count waiting, but grows where other processes use the caches. Each run repeats
    its first batch, whose reading is not timed.

    Args:
        configs: of the runs; their output folders are not written to.
        repeats: samples of each run, behind one that is not counted.

    Raises:
        UserError: an update failed for lack of memory; names the run.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        updates = {name: updates_of(config) for name, config in configs.items()}
        samples = {name: [] for name in updates}
        for _ in range(repeats + 1):
            for name, update in updates.items():
                seconds, failure = unless_out_of_memory(lambda update=update: _cpu_seconds(update))
                if seconds is None:
                    raise UserError(f"the pace of {name} cannot be measured: {failure}")
                samples[name].append(seconds)
    finally:
        torch.set_num_threads(threads)
    paces = {name: statistics.median(own[1:]) for name, own in samples.items()}
    for name, pace in paces.items():
        _LOGGER.info("%s: %.3f CPU s an update", name, pace)
    return paces


def cpu_seconds_of_an_update(config: TrainConfig, *, repeats: int = 20) -> float:
    """The median CPU time of a run's updates, as of :func:`measure_paces`, on any threads."""
    update = updates_of(config)
    update()
    return statistics.median(_cpu_seconds(update) for _ in range(repeats))


def _cpu_seconds(update: Callable[[], object]) -> float:
    started = time.process_time()
    update()
    return time.process_time() - started


def updates_of(config: TrainConfig) -> Callable[[], object]:
    """What makes an update of a run, its first one again and again."""
    accelerator = make_accelerator(config.optimisation.accumulation_steps)
    if config.machine.keep_freed_memory and accelerator.device.type == "cpu":
        keep_freed_memory()  # as in training; it holds for the whole process
    parts = assemble(config, accelerator, [], lambda: 0.0)
    parts.model.train()
    parts.scheduler.step_update(int(parts.length.warmup))
    batches = next(parts.loaders.updates(0, 0))
    moment = Moment(0.0, None if parts.average is None else parts.average.module)
    return lambda: parts.step(batches, 0, 0, moment)
