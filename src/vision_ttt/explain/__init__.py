"""Explanation of a model: inner losses, gradient maps, receptive fields, token norms, figures."""

from vision_ttt.explain.fast_weights import FastWeights, effective_rank, fast_weights
from vision_ttt.explain.gradient_maps import (
    gradient_layers,
    gradient_magnitude,
    mean_map,
    top_fraction,
)
from vision_ttt.explain.inner_loop import trace_layers
from vision_ttt.explain.inner_losses import LossCourse, inner_loss_course, inner_losses
from vision_ttt.explain.receptive_field import (
    anisotropy,
    centroid_offset,
    energy_within,
    radial_profile,
    receptive_field,
)
from vision_ttt.explain.token_distances import token_distances
from vision_ttt.explain.token_norms import (
    largest_over_median,
    outlier_share,
    stage_norms,
    token_norms,
)

__all__ = [
    "FastWeights",
    "LossCourse",
    "anisotropy",
    "centroid_offset",
    "effective_rank",
    "energy_within",
    "fast_weights",
    "gradient_layers",
    "gradient_magnitude",
    "inner_loss_course",
    "inner_losses",
    "largest_over_median",
    "mean_map",
    "outlier_share",
    "radial_profile",
    "receptive_field",
    "stage_norms",
    "token_distances",
    "token_norms",
    "top_fraction",
    "trace_layers",
]
