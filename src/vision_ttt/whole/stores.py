"""Where tokens are between two sweeps: in memory, or in a file of the scratch folder."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vision_ttt.whole.errors import WholePictureError

_WORDS = 128
"""The number of 8-byte words whose sum enters a checksum as one number."""


class Store(ABC):
    """Rows of numbers in float32 or bfloat16.

    Args:
        rows: how many.
        width: numbers of a row.
        dtype: of the numbers.
    """

    def __init__(self, rows: int, width: int, dtype: torch.dtype) -> None:
        self.rows, self.width, self.dtype = rows, width, dtype

    @abstractmethod
    def read(self, first: int, last: int) -> Tensor:
        """Rows ``first`` … ``last`` - 1, [last - first, width]."""

    def write(self, first: int, x: Tensor) -> Tensor:
        """Write rows x [n, width] from ``first`` on, and return them as they are stored."""
        raw = x.to(self.dtype)
        self._put(first, raw)
        return raw

    @abstractmethod
    def _put(self, first: int, raw: Tensor) -> None: ...


class MemoryStore(Store):
    """Rows in memory."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype) -> None:
        super().__init__(rows, width, dtype)
        self.kept = torch.empty(rows, width, dtype=dtype)

    def read(self, first: int, last: int) -> Tensor:
        """See :class:`Store`."""
        return self.kept[first:last]

    def _put(self, first: int, raw: Tensor) -> None:
        self.kept[first : first + len(raw)] = raw


class KeptBands(Store):
    """Rows in memory that are read as they were written, band by band: none is copied."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype) -> None:
        super().__init__(rows, width, dtype)
        self.kept: dict[int, Tensor] = {}

    def read(self, first: int, last: int) -> Tensor:
        """See :class:`Store`."""
        return self.kept[first]

    def _put(self, first: int, raw: Tensor) -> None:
        self.kept[first] = raw


class FileStore(Store):
    """Rows in a file, read and written where they are.

    It is not mapped into memory: pages of a map would count as the process's resident memory.

    Args:
        path: of the file, made where it is missing; one of another size is refused.

    Raises:
        ValueError: the file has another size.
    """

    def __init__(self, path: Path, rows: int, width: int, dtype: torch.dtype) -> None:
        super().__init__(rows, width, dtype)
        self.path, self._row = path, width * dtype.itemsize
        size = rows * self._row
        if path.exists():
            if path.stat().st_size != size:
                raise WholePictureError(
                    f"{path} has {path.stat().st_size} bytes, {size} are expected: it is damaged "
                    "or of another run; remove it"
                )
            self._file = path.open("r+b", buffering=0)
        else:
            self._file = path.open("w+b", buffering=0)
            self._file.truncate(size)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def read(self, first: int, last: int) -> Tensor:
        """See :class:`Store`."""
        raw = torch.empty(last - first, self.width, dtype=self.dtype)
        content = memoryview(raw.view(torch.uint8).numpy()).cast("B")
        self._file.seek(first * self._row)
        while content:
            count = self._file.readinto(content)
            if not count:
                raise WholePictureError(
                    f"{self.path} ends early: it was damaged while the run used it"
                )
            content = content[count:]
        return raw

    def _put(self, first: int, raw: Tensor) -> None:
        content = memoryview(raw.contiguous().view(torch.uint8).numpy()).cast("B")
        self._file.seek(first * self._row)
        while content:
            try:
                content = content[self._file.write(content) :]
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self.path)) from error


def checksum(raw: Tensor) -> int:
    """The CRC of the sums of each kilobyte's 8-byte words.

    It misses a change of one byte in at most one of some 2³² cases.
    """
    content = raw.contiguous().view(torch.uint8).numpy().reshape(-1)
    whole = len(content) // (8 * _WORDS) * (8 * _WORDS)
    # A CRC of all bytes would cost as much time as some layers do.
    sums = np.add.reduce(content[:whole].view(np.uint64).reshape(-1, _WORDS), axis=1)
    return zlib.crc32(content[whole:].tobytes(), zlib.crc32(sums.tobytes()))
