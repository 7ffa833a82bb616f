"""The timing of contenders: in turns in one process, warmed up, medians with their spread."""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean, quantiles
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import torch

Prepare = Callable[[], Callable[[], object]]
"""Makes fresh inputs, which is not timed, and returns the call to be timed on them."""

Advance = Callable[[str], None]
"""Called with the name of a contender after each step of its measurement."""

Result = TypeVar("Result")

_log = logging.getLogger(__name__)

WARMUP_CALLS = 2
"""Untimed calls. The first one builds what later calls reuse, the second estimates the duration."""
SHORTEST_REPEAT = 0.2
"""Seconds. Shorter calls are repeated and averaged, to reduce the noise."""
REST = 0.05
"""Seconds before a turn, in which idle threads of the previous contender stop to wait actively."""
OUT_OF_MEMORY = "out of memory"
"""The failure of a contender without enough memory."""

# Messages of the CPU allocator's error, which has no class of its own.
_NO_MEMORY = ("can't allocate memory", "not enough memory")


@dataclass(frozen=True)
class Settings:
    """The settings of a measurement."""

    device: torch.device
    dtype: torch.dtype = torch.float32
    batch_size: int = 1
    compiled: bool = False
    repeats: int = 5
    shortest_repeat: float = SHORTEST_REPEAT
    """Seconds, see :func:`interleave`."""
    longest_call: float = math.inf
    """Seconds, see :func:`interleave`."""
    memory_runs: int = 0
    """The number of processes that measure a model's memory on a CPU; 0 for no measurement."""

    @property
    def dtype_name(self) -> str:
        """E.g. "float32"."""
        return str(self.dtype).removeprefix("torch.")


class Timing(NamedTuple):
    """Seconds of one call, median and interquartile range over the repeats, or a failure.

    `seconds` is None if and only if `failure` is not empty.
    """

    seconds: float | None
    spread: float | None
    failure: str = ""


class Dropouts:
    """The contenders that failed, with their sizes. They are not measured at larger sizes."""

    def __init__(self) -> None:
        self._smallest: dict[str, tuple[int, str]] = {}

    def add(self, name: str, size: int, where: str, failure: str) -> None:
        """Record and log the failure of a contender at a size, which messages call `where`."""
        _log.warning("%s at %s is not timed: %s", name, where, failure)
        if name not in self._smallest or size < self._smallest[name][0]:
            self._smallest[name] = size, f"{failure} at {where}"

    def reason(self, name: str, size: int) -> str:
        """The reason why the contender is not measured at a size, or ""."""
        smallest, failure = self._smallest.get(name, (math.inf, ""))
        return failure if size >= smallest else ""


def interleave(
    contenders: Mapping[str, Prepare | None],
    settings: Settings,
    *,
    failed: Mapping[str, str] = MappingProxyType({}),
    advance: Advance = lambda _name: None,
) -> dict[str, Timing]:
    """Time the contenders in turns, so that a machine that slows down slows all of them.

    Each contender is warmed up first. Then, in each of the repeats, every contender has one turn:
    at least one call, and as many calls on fresh inputs as fill `settings.shortest_repeat` seconds.
    Every second round has the reverse order. A sample is the mean seconds per call of a turn.

    On a CPU the clock times a call, and a turn begins after a rest: idle threads of torch's pool
    wait actively for 10 ms after their last call, those of other runtimes for up to 40 ms, and
    would slow down the next contender.

    On CUDA events in the queue time a call, and the queue is not drained between the calls of a
    turn. As in ordinary use, work of the host ahead of the device costs nothing, and waiting of the
    device counts. The device's cache is overwritten before each call.

    A contender that runs out of memory or whose second call exceeds `settings.longest_call` is not
    measured further.

    Args:
        contenders: name → what prepares its call.
        settings: how to measure, on which device.
        failed: contenders that are not to be timed → the reason.
        advance: called with the contender's name after its warm-up and after each of its turns,
            `(repeats + 1) · len(contenders)` times if none fails.

    Raises:
        ValueError: there is no contender, or there are no repeats.
    """
    if not contenders or settings.repeats < 1:
        raise ValueError(
            f"there must be contenders and repeats, got {len(contenders)} and {settings.repeats}"
        )
    device = settings.device
    seconds_of = _seconds_on_cuda if device.type == "cuda" else _seconds_on_cpu
    calls: dict[str, int] = {}
    failures = {name: reason for name, reason in failed.items() if reason}
    for name, prepare in contenders.items():
        if name in failures:
            continue
        for _ in range(WARMUP_CALLS):
            warm, failure = unless_out_of_memory(lambda p=prepare: seconds_of(p, 1, device))
            if failure:
                break
        if warm is not None and warm > settings.longest_call:
            failure = f"a call takes over {settings.longest_call:g} s"
        if failure:
            failures[name] = failure
        else:
            calls[name] = math.ceil(settings.shortest_repeat / max(warm, 1e-6)) or 1
        advance(name)
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(settings.repeats):
        for name in list(contenders)[:: -1 if turn % 2 else 1]:
            if name in failures:
                continue
            prepare, count = contenders[name], calls[name]
            seconds, failure = unless_out_of_memory(
                lambda p=prepare, n=count: seconds_of(p, n, device)
            )
            if failure:
                failures[name] = failure
            else:
                samples[name].append(seconds)
            advance(name)
    return {
        name: Timing(None, None, failures[name]) if name in failures else summarise(values)
        for name, values in samples.items()
    }


def summarise(samples: list[float]) -> Timing:
    """Median and interquartile range of samples in seconds; one sample has no range."""
    if len(samples) == 1:
        return Timing(samples[0], None)
    first, median, third = quantiles(samples, n=4, method="inclusive")
    return Timing(median, third - first)


def unless_out_of_memory(step: Callable[[], Result]) -> tuple[Result | None, str]:
    """Run a step of a measurement; return (its result, ""), or (None, OUT_OF_MEMORY).

    Errors other than a lack of memory are raised.
    """
    try:
        return step(), ""
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not known and not any(sign in str(error) for sign in _NO_MEMORY):
            raise
    # After the except block the error is deleted, and with it the frames that refer to tensors.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None, OUT_OF_MEMORY


def _seconds_on_cpu(prepare: Prepare, calls: int, device: torch.device) -> float:
    samples = []
    time.sleep(REST)
    for _ in range(calls):
        call = prepare()
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return fmean(samples)


def _seconds_on_cuda(prepare: Prepare, calls: int, device: torch.device) -> float:
    # Inputs that were just made would be in the cache, unlike in ordinary use.
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    eviction = torch.empty(4 * cache, dtype=torch.uint8, device=device)
    marks = []
    for _ in range(calls):
        call = prepare()
        eviction.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        marks.append((start, end))
    torch.cuda.synchronize(device)
    return fmean(start.elapsed_time(end) for start, end in marks) / 1e3  # from milliseconds
