"""How contenders are timed: interleaved in one process, warmed up, medians with their spread."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean, quantiles
from typing import NamedTuple

import torch

Prepare = Callable[[], Callable[[], object]]
"""Makes fresh inputs, which is not timed, and returns the call to be timed on them."""

Advance = Callable[[str], None]
"""Told the name of a contender whenever a step of its measurement is done."""

WARMUP_CALLS = 2  # the first pays for what is built once; the second says how long a call takes
SHORTEST_REPEAT = 0.2  # seconds; shorter calls are repeated and averaged, or noise is what one sees


@dataclass(frozen=True)
class Settings:
    """How to measure, whatever it is."""

    device: torch.device
    dtype: torch.dtype = torch.float32
    batch_size: int = 1
    compiled: bool = False
    repeats: int = 5

    @property
    def dtype_name(self) -> str:
        """E.g. "float32"."""
        return str(self.dtype).removeprefix("torch.")


class Timing(NamedTuple):
    """Seconds of one call: median and interquartile range over the repeats."""

    seconds: float
    spread: float


def interleave(
    contenders: Mapping[str, Prepare],
    *,
    repeats: int,
    device: torch.device,
    shortest_repeat: float = SHORTEST_REPEAT,
    advance: Advance = lambda _name: None,
) -> dict[str, Timing]:
    """Time the contenders turn by turn, so that a machine that slows down slows all of them.

    Each is warmed up first. Then, in each of `repeats` rounds, every contender has one turn, of as
    many calls on fresh inputs as fill `shortest_repeat` seconds and at least one; every other round
    runs in reverse order. The mean seconds per call of a turn are one sample.

    Args:
        contenders: name → what prepares its call.
        repeats: samples per contender, at least 1.
        device: where the contenders compute; on CUDA its queue is drained before and after a call.
        shortest_repeat: seconds.
        advance: told the contender's name after its warm-up and after each of its turns, so
            `(repeats + 1) · len(contenders)` times.

    Raises:
        ValueError: there is nothing to time or `repeats` is below 1.
    """
    if not contenders or repeats < 1:
        raise ValueError(
            f"there must be contenders and repeats, got {len(contenders)} and {repeats}"
        )
    calls = {}
    for name, prepare in contenders.items():
        *_, warm = (_seconds(prepare, device) for _ in range(WARMUP_CALLS))
        calls[name] = max(1, math.ceil(shortest_repeat / warm))
        advance(name)
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(repeats):
        for name in list(contenders)[:: -1 if turn % 2 else 1]:
            prepare = contenders[name]
            samples[name].append(fmean(_seconds(prepare, device) for _ in range(calls[name])))
            advance(name)
    return {name: summarise(values) for name, values in samples.items()}


def summarise(samples: list[float]) -> Timing:
    """Median and interquartile range of samples in seconds."""
    if len(samples) == 1:
        return Timing(samples[0], 0.0)
    first, median, third = quantiles(samples, n=4, method="inclusive")
    return Timing(median, third - first)


def _seconds(prepare: Prepare, device: torch.device) -> float:
    call = prepare()
    _drain(device)
    start = time.perf_counter()
    call()
    _drain(device)
    return time.perf_counter() - start


def _drain(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
