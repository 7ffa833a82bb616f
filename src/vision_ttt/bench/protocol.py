"""How contenders are timed: interleaved in one process, warmed up, medians with their spread."""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean, quantiles
from typing import NamedTuple, TypeVar

import torch

Prepare = Callable[[], Callable[[], object]]
"""Makes fresh inputs, which is not timed, and returns the call to be timed on them."""

Advance = Callable[[str], None]
"""Told the name of a contender whenever a step of its measurement is done."""

Result = TypeVar("Result")

_log = logging.getLogger(__name__)

WARMUP_CALLS = 2  # the first pays for what is built once; the second says how long a call takes
SHORTEST_REPEAT = 0.2  # seconds; shorter calls are repeated and averaged, or noise is what one sees
REST = 0.05  # seconds before a turn; until then threads of the contender before may wait actively
OUT_OF_MEMORY = "out of memory"

# What the allocator of a CPU says where it gets no memory; it has no error class of its own.
_NO_MEMORY = ("can't allocate memory", "not enough memory")


@dataclass(frozen=True)
class Settings:
    """How to measure, whatever it is."""

    device: torch.device
    dtype: torch.dtype = torch.float32
    batch_size: int = 1
    compiled: bool = False
    repeats: int = 5
    shortest_repeat: float = SHORTEST_REPEAT
    longest_call: float = math.inf
    """Seconds, both: see :func:`interleave`."""
    memory_runs: int = 0
    """How many processes of their own measure a model's memory on a CPU; 0: it is not measured."""

    @property
    def dtype_name(self) -> str:
        """E.g. "float32"."""
        return str(self.dtype).removeprefix("torch.")


class Timing(NamedTuple):
    """Seconds of one call: median and interquartile range over the repeats; or why there are none.

    `seconds` and `spread` are None exactly where `failure` is not empty.
    """

    seconds: float | None
    spread: float | None
    failure: str = ""


class Dropouts:
    """Who failed at which size, told in the log: not to be tried again at that size or above."""

    def __init__(self) -> None:
        self._smallest: dict[str, tuple[int, str]] = {}

    def add(self, name: str, size: int, where: str, failure: str) -> None:
        """Remember the failure of a contender at a size that is called `where`."""
        _log.warning("%s at %s is not timed: %s", name, where, failure)
        if name not in self._smallest or size < self._smallest[name][0]:
            self._smallest[name] = size, f"{failure} at {where}"

    def reason(self, name: str, size: int) -> str:
        """Why the contender is not to be tried at a size, or ""."""
        smallest, failure = self._smallest.get(name, (math.inf, ""))
        return failure if size >= smallest else ""


def interleave(
    contenders: Mapping[str, Prepare],
    *,
    repeats: int,
    device: torch.device,
    shortest_repeat: float = SHORTEST_REPEAT,
    longest_call: float = math.inf,
    advance: Advance = lambda _name: None,
) -> dict[str, Timing]:
    """Time the contenders turn by turn, so that a machine that slows down slows all of them.

    Each is warmed up first. Then, in each of `repeats` rounds, every contender has one turn, of as
    many calls on fresh inputs as fill `shortest_repeat` seconds and at least one; every other round
    runs in reverse order. The mean seconds per call of a turn are one sample.

    On a CPU a call is timed by the clock, and a turn begins after a rest: threads of torch's pool
    wait actively for 10 ms after their last call, those of other runtimes for up to 40 ms, and
    would take the processor from the next contender.

    On CUDA a call is timed by events in the queue, which is not drained between the calls of a
    turn: what the host does ahead of the device costs nothing, as in use, and what the device waits
    for counts. Before each call its cache is overwritten.

    A contender that runs out of memory or takes too long drops out; the others go on.

    Args:
        contenders: name → what prepares its call.
        repeats: samples per contender, at least 1.
        device: where the contenders compute.
        shortest_repeat: seconds.
        longest_call: seconds; a contender whose second call takes longer drops out.
        advance: told the contender's name after its warm-up and after each of its turns, so
            `(repeats + 1) · len(contenders)` times if none drops out.

    Raises:
        ValueError: there is nothing to time or `repeats` is below 1.
    """
    if not contenders or repeats < 1:
        raise ValueError(
            f"there must be contenders and repeats, got {len(contenders)} and {repeats}"
        )
    seconds_of = _seconds_on_cuda if device.type == "cuda" else _seconds_on_cpu
    calls: dict[str, int] = {}
    failures: dict[str, str] = {}
    for name, prepare in contenders.items():
        for _ in range(WARMUP_CALLS):
            warm, failure = unless_out_of_memory(lambda p=prepare: seconds_of(p, 1, device))
            if failure:
                break
        if warm is not None and warm > longest_call:
            failure = f"a call takes over {longest_call:g} s"
        if failure:
            failures[name] = failure
        else:
            calls[name] = math.ceil(shortest_repeat / max(warm, 1e-6)) or 1
        advance(name)
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(repeats):
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
    """Median and interquartile range of samples in seconds."""
    if len(samples) == 1:
        return Timing(samples[0], 0.0)
    first, median, third = quantiles(samples, n=4, method="inclusive")
    return Timing(median, third - first)


def unless_out_of_memory(step: Callable[[], Result]) -> tuple[Result | None, str]:
    """Run a step of a measurement: (its result, ""), or (None, OUT_OF_MEMORY) if it had too little.

    Every other error goes through.
    """
    try:
        return step(), ""
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not known and not any(sign in str(error) for sign in _NO_MEMORY):
            raise
    # Out here the error is gone, and with it the frames that kept the tensors made so far.
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
    # Inputs made a moment ago would lie in the cache, as they do in no use of the call.
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
