"""Memory that a process has freed: the C library keeps it, or returns it to the system."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # glibc, malloc.h


def keep_freed_memory() -> bool:
    """Let malloc keep what this process frees, for the next step of a training run on a CPU.

    By default glibc returns large blocks to the system, which clears their pages when the next step
    asks for them again. Afterwards the process stays as large as it once was, until it ends, and
    allocates all memory in its heap, which then has more gaps. It holds for the whole process, and
    replaces what ``MALLOC_TRIM_THRESHOLD_`` and ``MALLOC_MMAP_MAX_`` in the environment say.

    Returns:
        Whether the C library has such a switch: glibc under Linux has.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(
        [mallopt(_M_MMAP_MAX, 0), mallopt(_M_TRIM_THRESHOLD, -1)]  # no separate maps; no limit
    )
