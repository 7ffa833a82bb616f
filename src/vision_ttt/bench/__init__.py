"""Measuring: what a model and an op cost, in multiply-adds, time and memory.

The counts are exported here; what measures time is imported by name, e.g.
:mod:`vision_ttt.bench.models`, because it brings plotting and logging along.
"""

from typing import TYPE_CHECKING

from vision_ttt._late import offer_late

if TYPE_CHECKING:
    from vision_ttt.bench.complexity import count_macs, count_parameters, equation_13_macs

__all__ = ["count_macs", "count_parameters", "equation_13_macs"]

offer_late(__name__, dict.fromkeys(__all__, "complexity"))
