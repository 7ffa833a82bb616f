"""Explanation of a TTT model: inner losses, gradient magnitude maps, figures and reports."""

from vision_ttt.explain.gradient_maps import gradient_magnitude_maps, top_fraction
from vision_ttt.explain.inner_loop import inner_losses, trace_layers

__all__ = ["gradient_magnitude_maps", "inner_losses", "top_fraction", "trace_layers"]
