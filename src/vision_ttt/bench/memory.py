"""The memory that a call takes above what was there before it."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path

import torch

from vision_ttt.bench.protocol import Prepare, Timing, unless_out_of_memory

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): sets the peak resident size to the present one


def can_measure(device: torch.device) -> bool:
    """Whether :func:`peak_memory` knows a way: on CUDA, and on a CPU under Linux."""
    return device.type == "cuda" or (_STATUS.exists() and os.access(_CLEAR_REFS, os.W_OK))


def peak_memory(prepare: Prepare, device: torch.device) -> int | None:
    """Bytes at the call's peak above those in use before it: weights and inputs do not count.

    On CUDA the allocator's own record. On a CPU the process's resident memory, whose peak Linux
    records and lets one reset; free pages of the heap are handed back first, so that the call has
    to take them again. Resident memory sees every allocator, the scratch of compiled kernels too,
    and what malloc cannot reuse because it is scattered. It has limits: pages count once they are
    written, their size is the grain, and the noise is about a megabyte, so that figures of few
    megabytes say little. The call must have run before: what a first call builds once is no part of
    it. Nothing else may allocate meanwhile.

    Returns:
        None where :func:`can_measure` is false.
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
    ctypes.CDLL(None).malloc_trim(0)
    before = _resident("VmRSS")
    _CLEAR_REFS.write_text(_RESET_PEAK)
    call()
    return max(0, _resident("VmHWM") - before)


def measure_memory(
    prepare: Prepare, device: torch.device, timing: Timing
) -> tuple[Timing, int | None]:
    """Return the timing of a call and its :func:`peak_memory`.

    A call that could not be timed is not run again; one that gets no memory now has failed too.
    """
    if timing.failure:
        return timing, None
    peak, failure = unless_out_of_memory(lambda: peak_memory(prepare, device))
    return (Timing(None, None, failure) if failure else timing), peak


def _resident(field: str) -> int:
    """Bytes of a field of the process's status, which gives kibibytes."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"{_STATUS} has no {field}")
