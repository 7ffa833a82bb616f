"""TTT-MLP: mini-batch gradient descent on a two-layer inner model along the sequence."""

from functools import partial

from vision_ttt.ops.inner_trace import token_losses, trace_tokens
from vision_ttt.ops.ttt_mlp.contract import CONTRACTS, Inputs, MLPState
from vision_ttt.ops.ttt_mlp.op import ttt_mlp

ttt_mlp_losses = partial(token_losses, CONTRACTS.one_state)
ttt_mlp_trace = partial(trace_tokens, Inputs, CONTRACTS.public)

__all__ = ["MLPState", "ttt_mlp", "ttt_mlp_losses", "ttt_mlp_trace"]
