"""TTT-Linear and what stands around it between a layer's projections, in one op."""

from vision_ttt.ops.fused_ttt_linear.api import fused_ttt_linear
from vision_ttt.ops.fused_ttt_linear.contract import fits

__all__ = ["fits", "fused_ttt_linear"]
