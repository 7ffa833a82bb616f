"""TTT-Linear: mini-batch gradient descent on a linear inner model along the sequence."""

from functools import partial

from vision_ttt.ops.inner_trace import token_losses, trace_tokens
from vision_ttt.ops.ttt_linear.contract import CONTRACTS, Inputs, LinearState
from vision_ttt.ops.ttt_linear.op import ttt_linear

ttt_linear_losses = partial(token_losses, CONTRACTS.one_state)
ttt_linear_trace = partial(trace_tokens, Inputs, CONTRACTS.public)

__all__ = ["LinearState", "ttt_linear", "ttt_linear_losses", "ttt_linear_trace"]
