"""Explanation of a model: inner losses, gradient magnitude maps, token norms, figures, reports."""

from vision_ttt.explain.fast_weights import FastWeights, effective_rank, fast_weights
from vision_ttt.explain.gradient_maps import (
    gradient_layers,
    gradient_magnitude,
    mean_map,
    top_fraction,
)
from vision_ttt.explain.inner_loop import trace_layers
from vision_ttt.explain.inner_losses import LossCourse, inner_loss_course, inner_losses
from vision_ttt.explain.token_norms import largest_over_median, outlier_share, token_norms

__all__ = [
    "FastWeights",
    "LossCourse",
    "effective_rank",
    "fast_weights",
    "gradient_layers",
    "gradient_magnitude",
    "inner_loss_course",
    "inner_losses",
    "largest_over_median",
    "mean_map",
    "outlier_share",
    "token_norms",
    "top_fraction",
    "trace_layers",
]
