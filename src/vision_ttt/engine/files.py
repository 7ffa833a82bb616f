"""Writing files whole or not at all."""

import os
from pathlib import Path


def write_bytes(path: Path, content: bytes) -> None:
    """Put `content` at `path` atomically: readers see the old file or the new one, never a part.

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
        raise OSError(error.errno, f"{error.strerror or error} ({kept})", str(path)) from error


def write_text(path: Path, content: str) -> None:
    """Put UTF-8 text at `path` atomically; see `write_bytes`."""
    write_bytes(path, content.encode())
