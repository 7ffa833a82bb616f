"""The memory of a call, in addition to the memory in use before it."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from vision_ttt.bench.protocol import OUT_OF_MEMORY, Prepare, Timing, unless_out_of_memory

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): sets the peak resident size to the present one


class Memory(NamedTuple):
    """Bytes, or None where they were not measured."""

    peak: int | None = None
    """The peak of a warm call above the memory in use before it; see :func:`peak_memory`."""
    held: int | None = None
    """The memory that the first call left in use: a runtime that keeps its buffers has small
    peaks."""


def can_measure(device: torch.device) -> bool:
    """Whether :func:`peak_memory` supports the device: CUDA, and a CPU under Linux."""
    return device.type == "cuda" or (_STATUS.exists() and os.access(_CLEAR_REFS, os.W_OK))


def peak_memory(prepare: Prepare, device: torch.device) -> int | None:
    """Bytes at the call's peak above those in use before it, without weights and inputs.

    On CUDA this is the allocator's own record. On a CPU it is the process's resident memory, whose
    peak Linux records and resets on request. Free pages of the heap are released first, so that the
    call has to allocate them again. Resident memory covers every allocator, the scratch of compiled
    kernels, and memory that malloc cannot reuse because of fragmentation. It has limits: pages
    count once they are written, the resolution is a page, and the noise is about a megabyte, so
    that figures of few megabytes mean little. The call must have run before, because a first call
    also builds what later ones reuse. Nothing else may allocate meanwhile.

    Returns:
        The bytes, or None where :func:`can_measure` is false.
    """
    if not can_measure(device):
        return None
    call = prepare()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    _release_free_pages()
    before = _resident("VmRSS")
    _CLEAR_REFS.write_text(_RESET_PEAK)
    call()
    return max(0, _resident("VmHWM") - before)


def measure_memory(
    prepare: Prepare, device: torch.device, timing: Timing
) -> tuple[Timing, int | None]:
    """Return the timing of a call and its :func:`peak_memory`.

    A call that could not be timed is not run again. A lack of memory here is a failure, too.
    """
    if timing.failure:
        return timing, None
    peak, failure = unless_out_of_memory(lambda: peak_memory(prepare, device))
    return (Timing(None, None, failure) if failure else timing), peak


def memory_in_processes(
    build: Callable[[], Prepare], device: torch.device, *, runs: int
) -> tuple[Memory, str]:
    """Measure a warm call in fresh processes, one after the other.

    The result is the median of `runs` fresh processes: the heap of a process that has computed
    other things is fragmented, and a call reuses more or less of it.

    Args:
        build: called in each process; returns what prepares the call. It is pickled, so it must be
            a function of a module or a partial of one.
        device: the device of the call.
        runs: the number of processes; 0 measures nothing.

    Returns:
        (the memory, ""), or (no memory, the reason) where the call ran out of memory.
    """
    if runs < 1 or not can_measure(device):
        return Memory(), ""
    # A fork server that has imported torch and never computed: its processes start at once, and no
    # thread of this process is copied in an undefined state.
    context = get_context("forkserver")
    context.set_forkserver_preload(["vision_ttt.bench.entrants"])
    found = []
    for _ in range(runs):
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            try:
                memory, failure = pool.submit(
                    _of_warm_call, build, device, torch.get_num_threads()
                ).result()
            except BrokenProcessPool:  # the system killed the process
                memory, failure = None, OUT_OF_MEMORY
        if failure:
            return Memory(), failure
        found.append(memory)
    return Memory(*(int(median(values)) for values in zip(*found, strict=True))), ""


def _of_warm_call(
    build: Callable[[], Prepare], device: torch.device, threads: int
) -> tuple[Memory | None, str]:
    torch.set_num_threads(threads)

    def measure() -> Memory:
        prepare = build()
        _release_free_pages()
        before = _resident("RssAnon")  # without the libraries' pages, which processes share
        prepare()()
        _release_free_pages()
        held = max(0, _resident("RssAnon") - before)
        return Memory(peak_memory(prepare, device), held)

    return unless_out_of_memory(measure)


def _release_free_pages() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _resident(field: str) -> int:
    """Bytes of a field of the process's status, which gives kibibytes."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"{_STATUS} has no {field}")
