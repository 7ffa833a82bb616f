"""What a path leads to: files that can be read to their end, and what only looks like them."""

import stat
from pathlib import Path, PurePath

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_SYSTEM = (Path("/proc"), Path("/sys"))


def kind_of_file(mode: int) -> str:
    """What a `st_mode` says that something is, for a sentence: "a file", "a named pipe", …"""
    return _KINDS.get(stat.S_IFMT(mode), "a file")


def is_hidden(path: PurePath) -> bool:
    """Whether a name of the path begins with a dot: .cache/x.txt, ._x.txt; programs make them."""
    return any(name.startswith(".") and name != ".." for name in path.parts)


def is_of_the_system(path: Path) -> bool:
    """Whether a path leads into /proc or /sys: reading there may never end, nor following links."""
    resolved = path.resolve()
    return any(resolved.is_relative_to(root) for root in _SYSTEM)
