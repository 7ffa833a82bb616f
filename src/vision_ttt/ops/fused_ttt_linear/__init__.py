"""Everything between the projections of a TTT-Linear layer, in one op."""

from vision_ttt.ops.fused_ttt_linear.op import fused_ttt_linear

__all__ = ["fused_ttt_linear"]
