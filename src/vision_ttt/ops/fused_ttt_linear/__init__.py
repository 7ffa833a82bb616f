"""TTT-Linear and what stands around it between a layer's projections, in one op."""

from vision_ttt.ops.fused_ttt_linear.op import fused_ttt_linear

__all__ = ["fused_ttt_linear"]
