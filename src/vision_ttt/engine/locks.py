"""Folders that one process at a time works in.

The lock is the system's, on a file held open: it ends with the process that holds it, however that
ends, so that there are no stale locks, and a file that a killed process leaves means nothing.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None

_LOGGER = logging.getLogger(__name__)
LOCK_FILES = (".lock", ".training.lock")
"""The first is for whoever works in a folder, the second for the training run in it: a sweep holds
the first one while the run, in the same process, holds the second."""
_WITHOUT_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}
_held: set[int] = set()


def _let_go() -> None:
    """Close the locks in a forked child: it must not hold its parent's if the parent is killed."""
    for descriptor in _held:
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


@contextmanager
def alone_in(folder: Path, *, wait: bool, lock: str = LOCK_FILES[0]) -> Iterator[None]:
    """Hold a folder, which is created if it is missing, until the block or the process ends.

    A folder that was created and is still empty is removed again. If the file system has no locks,
    a warning says so.

    Args:
        wait: wait for the process that holds the folder; otherwise raise.
        lock: name of the lock's file, one of `LOCK_FILES`.

    Raises:
        BlockingIOError: another process holds it, and `wait` is off.
        OSError: the folder cannot be made or written.
    """
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    path = folder / lock
    descriptor = _locked(path, wait)
    _held.add(descriptor)
    try:
        yield
    finally:
        with suppress(OSError):  # it is gone, or a folder that was made is not empty
            path.unlink()
            for each in made:
                each.rmdir()
        _held.discard(descriptor)
        os.close(descriptor)


def _locked(path: Path, wait: bool) -> int:
    """Open `path` and lock it; return its descriptor."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)  # its former holder may have removed it
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if not _lock(descriptor, path, wait):
                return descriptor
            # Its former holder may have removed the file after it was opened here.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int, path: Path, wait: bool) -> bool:
    """Lock an open file; False where there are no locks."""
    try:
        if fcntl is None:
            raise OSError(errno.ENOSYS, "the system has no such locks")
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        _LOGGER.warning("%s cannot be locked (%s): see that no two runs share it", path, error)
        return False
    return True
