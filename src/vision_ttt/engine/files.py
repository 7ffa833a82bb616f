"""Writing files whole or not at all."""

import contextlib
import os
from pathlib import Path


def write_bytes(path: Path, content: bytes | bytearray) -> None:
    """Put `content` at `path` atomically: readers see the old file or the new one, never a part.

    Nor does a crash of the machine leave a part: the content is on the disk before it gets its
    name, and the name before this returns.

    Raises:
        OSError: the disk is full or the folder cannot be written; names `path`, whose former
            content is kept, and leaves no temporary file.
    """
    # In the same folder, because a rename is atomic only within a file system.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
            with temporary.open("wb") as file:
                file.write(content)
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
    _sync_folder(path.parent)


def write_text(path: Path, content: str) -> None:
    """Put UTF-8 text at `path` atomically; see `write_bytes`."""
    write_bytes(path, content.encode())


def remove_parts(*folders: Path) -> None:
    """Remove the temporary files of processes that were killed while they wrote."""
    for folder in folders:
        for part in folder.glob(".*.part"):
            part.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":  # elsewhere folders cannot be opened
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # Some file systems refuse; the rename is atomic there, too, only its moment is theirs.
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
