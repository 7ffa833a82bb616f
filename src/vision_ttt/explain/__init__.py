"""Explanation of a model: inner losses, gradient magnitude maps, token norms, figures, reports."""

from vision_ttt.explain.gradient_maps import gradient_magnitude_maps, top_fraction
from vision_ttt.explain.inner_loop import inner_losses, trace_layers
from vision_ttt.explain.token_norms import largest_over_median, outlier_share, token_norms

__all__ = [
    "gradient_magnitude_maps",
    "inner_losses",
    "largest_over_median",
    "outlier_share",
    "token_norms",
    "top_fraction",
    "trace_layers",
]
