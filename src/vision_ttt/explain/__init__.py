"""Explanation of a model: inner losses, gradient magnitude maps, token norms, figures, reports."""

from vision_ttt.explain.deletion import area_under, deletion_curve, insertion_curve
from vision_ttt.explain.gradient_maps import gradient_magnitude_maps, top_fraction
from vision_ttt.explain.inner_loop import inner_losses, trace_layers
from vision_ttt.explain.token_norms import largest_over_median, outlier_share, token_norms

__all__ = [
    "area_under",
    "deletion_curve",
    "gradient_magnitude_maps",
    "inner_losses",
    "insertion_curve",
    "largest_over_median",
    "outlier_share",
    "token_norms",
    "top_fraction",
    "trace_layers",
]
