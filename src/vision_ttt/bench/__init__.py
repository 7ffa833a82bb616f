"""Benchmarks: multiply-adds, time and memory of models and ops.

This module exports the counts only. Modules that measure time are imported by their own names, e.g.
:mod:`vision_ttt.bench.models`, because they import plotting and logging too.
"""

from typing import TYPE_CHECKING

from vision_ttt._lazy import lazy_exports

if TYPE_CHECKING:
    from vision_ttt.bench.complexity import count_macs, count_parameters

__all__ = ["count_macs", "count_parameters"]

lazy_exports(__name__, dict.fromkeys(__all__, "complexity"))
