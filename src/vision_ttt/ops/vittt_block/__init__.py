"""A whole Vittt block in one op, for inference on a CPU."""

from vision_ttt.ops.vittt_block.api import Parameters, agree, fits, vittt_block

__all__ = ["Parameters", "agree", "fits", "vittt_block"]
