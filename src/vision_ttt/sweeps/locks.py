"""Folders that one process at a time works in."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOCK_FILE = ".lock"


@contextmanager
def alone_in(folder: Path, *, wait: bool) -> Iterator[None]:
    """Hold a folder, made where missing, until the block or the process ends, however it does.

    Args:
        wait: for the process that holds it; otherwise raise.

    Raises:
        BlockingIOError: another process holds it, and `wait` is off.
        OSError: the folder cannot be made or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(descriptor)
