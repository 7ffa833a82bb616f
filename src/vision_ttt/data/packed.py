"""Many small objects in one block of memory, which worker processes share instead of copying."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class PackedBytes:
    """A sequence of byte strings, kept as one.

    A Python object's reference count lies beside its content: a forked process that only reads a
    list of a million objects ends up with a copy of each page that they lie on. This is one object.
    """

    def __init__(self, parts: Iterable[bytes]) -> None:
        content = bytearray()
        ends = [0]
        for part in parts:
            content += part
            ends.append(len(content))
        self._content = bytes(content)
        self._ends = np.array(ends, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> bytes:
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} parts")
        return self._content[self._ends[index] : self._ends[index + 1]]
