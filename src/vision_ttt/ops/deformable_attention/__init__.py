"""Multi-scale deformable attention."""

from vision_ttt.ops.deformable_attention.op import deformable_attention

__all__ = ["deformable_attention"]
