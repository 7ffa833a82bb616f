"""TTT-Linear on a CPU: the compiled kernels in csrc/scans/ttt_linear."""

from __future__ import annotations

from vision_ttt.ops._learner_cpu import LearnerCall, refusal
from vision_ttt.ops._op import Backend
from vision_ttt.ops.ttt_linear.dual import checkpoint_interval


class Call(LearnerCall):
    """A call of ttt_linear."""

    op = "ttt_linear"
    layers = 1
    checkpoint_interval = staticmethod(checkpoint_interval)


BACKEND = Backend(Call.run_forward, Call.run_backward, refusal, Call.run_inference)
