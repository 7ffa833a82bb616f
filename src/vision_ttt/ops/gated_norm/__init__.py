"""Post norms of the scan directions, their sum, and the gate, in one pass over memory."""

from vision_ttt.ops.gated_norm.op import gated_norm

__all__ = ["gated_norm"]
