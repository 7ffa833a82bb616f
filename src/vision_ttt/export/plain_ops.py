"""The ops as PyTorch's own operations, for programs that run without this package.

An op of ``vision_ttt.ops`` is opaque to ``torch.export``; these decompositions take its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vision_ttt.ops.ttt_linear.scan import ttt_linear_scan
from vision_ttt.ops.ttt_mlp.scan import ttt_mlp_scan

Op = Callable[..., tuple[Tensor, ...]]


def _custom_op(scan: Op) -> Op:
    """A scan with the arguments and results of the op's custom op; the backend plays no part."""

    def op(*arguments: Any) -> tuple[Tensor, ...]:
        *problem, save_states, _ = arguments
        assert not save_states, "exported without gradients"
        o, *state = scan(*problem)
        return o, *state, *(x.new_empty(0, *x.shape) for x in state)

    return op


def decompositions() -> dict[Any, Op]:
    """What ``ExportedProgram.run_decompositions`` needs to replace the ops."""
    return {
        torch.ops.vision_ttt.ttt_linear.default: _custom_op(ttt_linear_scan),
        torch.ops.vision_ttt.ttt_mlp.default: _custom_op(ttt_mlp_scan),
    }
