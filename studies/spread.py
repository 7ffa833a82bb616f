"""A figure of several runs: its mean and its spread."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Mean over seeds, and the sample standard deviation (n - 1), None where all are equal."""

    mean: float
    deviation: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Aggregate at least one value; NaN, of what was not measured, has no deviation."""
        if any(math.isnan(value) for value in values):
            return cls(math.nan, None)
        deviation = statistics.stdev(values) if len(set(values)) > 1 else None
        return cls(statistics.fmean(values), deviation)

    def text(self, decimals: int) -> str:
        """E.g. "0.123 ± 0.004"; nothing where a value was not measured, NaN."""
        if math.isnan(self.mean):
            return ""
        if self.deviation is None:
            return f"{self.mean:.{decimals}f}"
        return f"{self.mean:.{decimals}f} ± {self.deviation:.{decimals}f}"
