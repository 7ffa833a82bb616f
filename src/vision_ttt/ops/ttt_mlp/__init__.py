"""TTT-MLP: mini-batch gradient descent on a two-layer inner model along the sequence."""

from vision_ttt.ops.ttt_mlp.op import ttt_mlp
from vision_ttt.ops.ttt_mlp.state import MLPState

__all__ = ["MLPState", "ttt_mlp"]
