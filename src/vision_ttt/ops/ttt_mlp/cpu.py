"""TTT-MLP on a CPU: the compiled kernels in csrc/scans/ttt_mlp."""

from __future__ import annotations

from vision_ttt.ops._learner_cpu import LearnerCall, refusal
from vision_ttt.ops._op import Backend
from vision_ttt.ops.ttt_mlp.dual import checkpoint_interval


class Call(LearnerCall):
    """A call of ttt_mlp."""

    op = "ttt_mlp"
    layers = 2
    checkpoint_interval = staticmethod(checkpoint_interval)


BACKEND = Backend(Call.run_forward, Call.run_backward, refusal, Call.run_inference)
