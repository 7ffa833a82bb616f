"""All of a bidirectional Mamba layer between its wide projections, as one op."""

from vision_ttt.ops.fused_mamba.op import fused_mamba

__all__ = ["fused_mamba"]
