"""How the time of each contender grows with the size of its input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vision_ttt.bench.rows import Row


class Fit(NamedTuple):
    """The exponent of time in tokens, and the range of sizes that it was fitted to."""

    exponent: float
    smallest: int
    largest: int
    unit: str
    """The unit of the sizes: tokens, or pixels along a side."""

    def sentence(self, label: str) -> str:
        """E.g. "dual, forward: time ~ tokens^1.003 between 4,096 and 65,536 tokens"."""
        between = f"between {self.smallest:,} and {self.largest:,} {self.unit}"
        return f"{label}: time ~ tokens^{self.exponent:.3f} {between}"


def exponents(rows: Sequence[Row], between: tuple[float, float] = (0, math.inf)) -> dict[str, Fit]:
    """Fit time = c · tokenˢ by least squares of the logarithms, per contender (and pass).

    Args:
        rows: those of one command. The size is the number of tokens, or that of pixels, which is
            proportional.
        between: the smallest and the largest size of the fit: tokens of an op, pixels along a side
            of a model.

    Returns:
        Label → fit, for contenders that were measured at two sizes or more.
    """
    smallest, largest = between
    fits = {}
    for label, own in by_line(rows).items():
        timed = [row for row in own if row.seconds is not None]
        fitted = [row for row in timed if smallest <= row.extent <= largest]
        sizes = sorted({row.extent for row in fitted})
        if len(sizes) > 1:
            unit = "tokens" if own[0].resolution is None else "pixels along a side"
            logarithms = np.log([[row.size, row.seconds] for row in fitted])
            slope = np.polyfit(logarithms[:, 0], logarithms[:, 1], 1)[0]
            fits[label] = Fit(float(slope), sizes[0], sizes[-1], unit)
    return fits


def by_line(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Label of a line in a figure → its rows."""
    lines: dict[str, list[Row]] = {}
    for row in rows:
        several = row.what in ("ops", "dense", "lm")
        label = f"{row.contender}, {row.measured}" if several else row.contender
        lines.setdefault(label, []).append(row)
    return lines
