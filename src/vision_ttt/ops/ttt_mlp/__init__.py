"""TTT-MLP: mini-batch gradient descent on a two-layer inner model along the sequence."""

from vision_ttt.ops.ttt_mlp.op import ttt_mlp

__all__ = ["ttt_mlp"]
