"""Plans what a run needs before it begins: rows of a band, memory, scratch space."""

from __future__ import annotations

import re
from dataclasses import dataclass
from numbers import Integral

from vision_ttt.whole.errors import WholePictureError

PROCESS = 832 * 2**20
"""Bytes that Python, PyTorch, timm and this package take by themselves, measured in the command."""

BAND_TOKENS = 2**14
"""The largest number of tokens of a band. Larger bands are not faster."""

_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True)
class Plan:
    """What a picture of one size needs.

    ``str(plan)`` says it in one line.
    """

    grid: tuple[int, int]
    """Rows and columns of tokens."""
    rows: int
    """Rows of a band."""
    memory: int
    """The largest resident memory in bytes of a process with nothing but PyTorch and the model."""
    scratch: int
    """Bytes of the scratch folder; without one, bytes of memory that ``memory`` includes."""
    in_memory: bool

    def __str__(self) -> str:
        height, width = self.grid
        place = "memory" if self.in_memory else "the scratch folder"
        return (
            f"{height} × {width} tokens in bands of {self.rows} rows; "
            f"{in_units(self.memory)} of memory; {in_units(self.scratch)} of tokens in {place}"
        )


@dataclass(frozen=True)
class Needs:
    """The bytes from which a plan is made."""

    fixed: int
    """Independent of the number of tokens: the process, the reader, the weights, logits at once."""
    per_token: int
    """Per token of the band that is being processed."""
    halo: int
    """Rows around a band that are read with it."""
    stored_tokens: int
    """Per token of the picture and of one more band: the tokens that pass from block to block."""
    stored_side: int
    """Per token of the picture: what sweeps store for later sweeps of their block."""

    def plan(self, grid: tuple[int, int], memory: int | None, *, in_memory: bool) -> Plan:
        """Choose the largest bands that the memory has room for.

        Args:
            grid: rows and columns of tokens.
            memory: bytes; None for as much as the largest band needs.
            in_memory: whether the tokens are kept in memory, too.

        Raises:
            ValueError: the memory has no room for bands of one row.
        """
        height, width = grid
        rows = min(height, max(BAND_TOKENS // width, 1))
        if memory is not None:
            while rows > 1 and self._memory(grid, rows, in_memory) > memory:
                rows = max(rows * 7 // 8, 1) if rows > 8 else rows - 1
            least = self._memory(grid, rows, in_memory)
            if least > memory:
                what = "" if in_memory else " beside the scratch folder"
                advice = "; with a scratch folder less is enough" if in_memory else ""
                raise WholePictureError(
                    f"memory is {in_units(memory)}; a picture of {height} × {width} tokens needs "
                    f"at least {in_units(least)}{what}{advice}"
                )
        return Plan(
            grid,
            rows,
            self._memory(grid, rows, in_memory),
            self._scratch(grid, rows),
            in_memory,
        )

    def _memory(self, grid: tuple[int, int], rows: int, in_memory: bool) -> int:
        band = (min(rows, grid[0]) + 2 * self.halo) * grid[1]
        return self.fixed + band * self.per_token + (self._scratch(grid, rows) if in_memory else 0)

    def _scratch(self, grid: tuple[int, int], rows: int) -> int:
        height, width = grid
        tokens = (height + rows + self.halo) * width * self.stored_tokens
        return tokens + height * width * self.stored_side


def parse_bytes(name: str, value: int | str | None) -> int | None:
    """Return a number of bytes, given as such or as text: "2GiB", "512 MB".

    Raises:
        TypeError, ValueError: it is neither, or not above 0.
    """
    if value is None:
        return None
    if isinstance(value, str):
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B|)", value.strip())
        if found is None or found[2] not in _UNITS:
            units = ", ".join(unit for unit in _UNITS if unit)
            raise WholePictureError(
                f"{name} is {value!r}; accepted: a number of bytes, or of {units}"
            )
        value = int(float(found[1]) * _UNITS[found[2]])
    elif isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} is {value!r}; accepted: a number of bytes, or text such as '2GiB'")
    if value < 1:
        raise WholePictureError(f"{name} is {value}; accepted: above 0")
    return int(value)


def in_units(count: int) -> str:
    """A number of bytes as text: "1.5 GiB"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if count >= _UNITS[unit]:
            return f"{count / _UNITS[unit]:.1f} {unit}"
    return f"{count} B"
