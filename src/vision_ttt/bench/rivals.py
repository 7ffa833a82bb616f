"""The rows that a model's row is compared with: alternatives measured by the same command."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from vision_ttt.bench.contenders import is_ours, size_of
from vision_ttt.bench.rows import Row


class Rivals(NamedTuple):
    """Other projects' models of a row's size, by the same command and at the same resolution.

    Each field is the fastest row of its kind, or None where none was timed.
    """

    strongest: Row | None
    """By any runtime: what one would deploy instead."""
    eager: Row | None
    """PyTorch's modules with fused attention."""
    plain: Row | None
    """PyTorch's modules with plain attention, which the papers measure."""


def find_rivals(row: Row, among: Sequence[Row]) -> Rivals:
    """Find the rivals of a model's row among rows of any commands.

    A rival has the size word of the row's model: DeiT-S is a rival of Vittt-S. If the command
    measured no such model, all other projects' models are rivals.
    """
    beside = [
        other
        for other in among
        if (other.run, other.measured, other.size) == (row.run, row.measured, row.size)
        and not is_ours(other.contender)
    ]
    own_size = size_of(row.contender)
    of_its_size = [other for other in beside if size_of(other.contender) == own_size] or beside
    return Rivals(
        _fastest(of_its_size),
        _fastest(other for other in of_its_size if "(fused attention)" in other.contender),
        _fastest(other for other in of_its_size if "(plain attention)" in other.contender),
    )


def _fastest(rows: Iterable[Row]) -> Row | None:
    timed = (row for row in rows if row.seconds is not None)
    return min(timed, key=lambda row: row.seconds, default=None)
