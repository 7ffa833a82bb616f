"""A whole Vittt block in one op, for inference on a CPU."""

from vision_ttt.ops.vittt_block.api import Parameters, fits, vittt_block

__all__ = ["Parameters", "fits", "vittt_block"]
