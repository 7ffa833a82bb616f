"""Explanation of a model: inner losses, gradient maps, receptive fields, token norms, figures."""

from vision_ttt.explain.deletion import area_under, deletion_curve, insertion_curve
from vision_ttt.explain.grad_cam import grad_cam
from vision_ttt.explain.gradient_input import gradient_times_input
from vision_ttt.explain.gradient_maps import gradient_magnitude_maps, top_fraction
from vision_ttt.explain.inner_loop import inner_losses, trace_layers
from vision_ttt.explain.receptive_field import (
    anisotropy,
    centroid_offset,
    energy_within,
    radial_profile,
    receptive_field,
)
from vision_ttt.explain.rollout import attention_rollout
from vision_ttt.explain.token_norms import (
    largest_over_median,
    outlier_share,
    stage_norms,
    token_norms,
)

__all__ = [
    "anisotropy",
    "area_under",
    "attention_rollout",
    "centroid_offset",
    "deletion_curve",
    "energy_within",
    "grad_cam",
    "gradient_magnitude_maps",
    "gradient_times_input",
    "inner_losses",
    "insertion_curve",
    "largest_over_median",
    "outlier_share",
    "radial_profile",
    "receptive_field",
    "stage_norms",
    "token_norms",
    "top_fraction",
    "trace_layers",
]
