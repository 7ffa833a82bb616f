"""TTT-Linear: mini-batch gradient descent on a linear inner model along the sequence."""

from vision_ttt.ops.ttt_linear.op import ttt_linear
from vision_ttt.ops.ttt_linear.state import LinearState
from vision_ttt.ops.ttt_linear.trace import ttt_linear_losses, ttt_linear_trace

__all__ = ["LinearState", "ttt_linear", "ttt_linear_losses", "ttt_linear_trace"]
