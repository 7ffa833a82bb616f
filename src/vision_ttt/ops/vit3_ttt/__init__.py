"""ViT³'s inner training in closed form: one full-batch gradient step of each inner model.

The step of the depth-wise inner model has an op of its own, depthwise_correlation, whose files are
those of any op: contract.py, definition.py, cpu.py and op.py.
"""

from vision_ttt.ops.vit3_ttt.depthwise import (
    depthwise,
    depthwise_after,
    depthwise_ascent,
    depthwise_gradient_norms,
    depthwise_step,
)
from vision_ttt.ops.vit3_ttt.gated_unit import (
    gated_unit,
    gated_unit_after,
    gated_unit_ascent,
    gated_unit_gradient_norms,
    gated_unit_step,
)
from vision_ttt.ops.vit3_ttt.op import depthwise_correlation

__all__ = [
    "depthwise",
    "depthwise_after",
    "depthwise_ascent",
    "depthwise_correlation",
    "depthwise_gradient_norms",
    "depthwise_step",
    "gated_unit",
    "gated_unit_after",
    "gated_unit_ascent",
    "gated_unit_gradient_norms",
    "gated_unit_step",
]
