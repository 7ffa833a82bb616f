"""ViT³'s inner training in closed form: one full-batch gradient step of each inner model."""

from vision_ttt.ops.vit3_inner.depthwise import (
    depthwise,
    depthwise_gradient_norms,
    depthwise_step,
)
from vision_ttt.ops.vit3_inner.gated_unit import (
    gated_unit,
    gated_unit_gradient_norms,
    gated_unit_step,
)

__all__ = [
    "depthwise",
    "depthwise_gradient_norms",
    "depthwise_step",
    "gated_unit",
    "gated_unit_gradient_norms",
    "gated_unit_step",
]
