"""Writing files whole or not at all; comparing their paths."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def same_path(one: str, other: str) -> bool:
    """Whether two spellings name one path; links are not followed."""
    first, second = (os.path.abspath(os.path.expanduser(each)) for each in (one, other))
    return first == second


@contextlib.contextmanager
def atomic_file(path: Path, *, synced: bool = True) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` atomically when the context ends without error.

    Readers see the old file or the new one, never a part. A crash of the machine leaves no part
    either: the content is on the disk before it gets its name, and the name before this returns.
    Without `synced` this holds for a killed process only, and takes a tenth of the time.

    Raises:
        OSError: the disk is full or the folder cannot be written; names `path`, whose former
            content is kept, and leaves no temporary file.
    """
    # In the same folder, because a rename is atomic only within a file system.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
            with temporary.open("wb") as file:
                yield file
                if synced:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        kept = "its former content is kept" if path.exists() else "nothing was written"
        if not path.parent.is_dir():
            kept = "nothing was written: the folder is gone"
        raise OSError(error.errno, f"{error.strerror or error} ({kept})", str(path)) from error
    if synced:
        sync_folder(path.parent)


def write_bytes(path: Path, content: bytes | bytearray) -> None:
    """Write `content` to `path` atomically; see `atomic_file`."""
    with atomic_file(path) as file:
        file.write(content)


def write_text(path: Path, content: str) -> None:
    """Write UTF-8 text to `path` atomically; see `atomic_file`."""
    write_bytes(path, content.encode())


def sync_folder(folder: Path) -> None:
    """Wait until the names in `folder` are on the disk."""
    if os.name != "posix":  # elsewhere folders cannot be opened
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # Some file systems refuse. There, too, a rename is atomic; they choose when it is stored.
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_part(path: Path) -> bool:
    """Whether it is a temporary file of `atomic_file`."""
    return path.match(".*.part")


def remove_parts(*folders: Path) -> None:
    """Remove the temporary files of processes that were killed while they wrote."""
    for folder in folders:
        for part in folder.glob(".*.part"):
            part.unlink(missing_ok=True)
