"""Measuring: what a model costs."""

from vision_ttt.bench.complexity import count_macs, count_parameters, equation_13_macs

__all__ = ["count_macs", "count_parameters", "equation_13_macs"]
