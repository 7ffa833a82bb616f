"""What a path leads to: files that can be read to their end, and what only looks like them."""

import os
import stat
from pathlib import Path, PurePath

from vision_ttt.errors import UserError

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".png", ".webp", ".tif", ".tiff"),
    *(".bmp", ".ppm", ".pgm", ".gif", ".jp2", ".avif"),
)
"""Suffixes of image files, in lower case. Folders and shards are searched for these names."""

_SYSTEM = (Path("/proc"), Path("/sys"))


class UnreadableFile(UserError, ValueError):
    """A path that leads to no file, or to one that is too large to be read; names it."""

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(f"{path} cannot be read: {reason}")
        self.path, self.reason = path, reason

    def __reduce__(self) -> tuple:
        return type(self), (self.path, self.reason)  # so that worker processes can send it


def check_regular(path: str | Path, most: int | None = None) -> None:
    """Check that a path leads to a file that can be read to its end.

    Args:
        most: bytes that the file may have; None for any number.

    Raises:
        UnreadableFile: it is a folder, a named pipe or a device, or too large.
        FileNotFoundError: there is nothing.
    """
    status = Path(path).stat()
    if not stat.S_ISREG(status.st_mode):
        raise UnreadableFile(path, f"it is {kind_of_file(status.st_mode)}, not a file")
    if most is not None and status.st_size > most:
        raise UnreadableFile(
            path, f"it has {status.st_size:,} bytes; at most {most:,} are accepted"
        )


def read_regular(path: str | Path, most: int) -> bytes:
    """Return the content of a file of at most `most` bytes.

    Raises:
        UnreadableFile, FileNotFoundError: as :func:`check_regular`; the file is in /proc or /sys.
        OSError: the file cannot be read.
    """
    check_regular(path, most)
    if is_of_the_system(Path(path)):
        raise UnreadableFile(path, "it is in /proc or /sys")
    return Path(path).read_bytes()


def check_files_in(folder: Path) -> None:
    """Check that what lies in a folder, which another library is to read, are files and folders.

    Raises:
        UnreadableFile: something is a named pipe or a device.
        OSError: the folder cannot be read.
    """
    for entry in folder.iterdir():
        if entry.exists() and not entry.is_dir():
            check_regular(entry)


def kind_of_file(mode: int) -> str:
    """What a `st_mode` says that something is, for a sentence: "a file", "a named pipe", …"""
    return _KINDS.get(stat.S_IFMT(mode), "a file")


def as_text(name: str) -> str:
    """Return a file's name as text that can be written: bytes that are no UTF-8 become U+FFFD."""
    return os.fsencode(name).decode("utf-8", "replace")


def is_text(name: str) -> bool:
    """Whether a name can be written in UTF-8.

    Those of files may hold other bytes, and those in JSON and YAML halves of characters
    (surrogates, such as U+D800).
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_hidden(path: PurePath) -> bool:
    """Whether a name of the path begins with a dot: .cache/x.txt, ._x.txt; programs make them."""
    return any(name.startswith(".") and name != ".." for name in path.parts)


def is_of_the_system(path: Path) -> bool:
    """Whether a path leads into /proc or /sys: reading there may never end, nor following links."""
    resolved = path.resolve()
    return any(resolved.is_relative_to(root) for root in _SYSTEM)
