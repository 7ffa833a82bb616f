"""TTT-MLP: mini-batch gradient descent on a two-layer inner model along the sequence."""

from vision_ttt.ops.ttt_mlp.op import ttt_mlp
from vision_ttt.ops.ttt_mlp.state import MLPState
from vision_ttt.ops.ttt_mlp.trace import ttt_mlp_losses, ttt_mlp_trace

__all__ = ["MLPState", "ttt_mlp", "ttt_mlp_losses", "ttt_mlp_trace"]
