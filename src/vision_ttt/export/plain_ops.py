"""The ops as PyTorch's own operations, for programs that run without this package.

An op of ``vision_ttt.ops`` is opaque to ``torch.export``; these decompositions take its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from vision_ttt.ops._op import Op
from vision_ttt.ops._table import TABLE

Decomposition = Callable[..., tuple[Tensor, ...]]


def _decomposition(op: Op) -> Decomposition:
    """The op as a scan, for its custom op's arguments; the backend plays no part."""

    def decomposed(*arguments: Any) -> tuple[Tensor, ...]:
        *problem, save_states, _ = arguments
        assert not save_states, "exported without gradients"
        o, *state = op.exported(op.inputs(*problem))
        return o, *state, *(x.new_empty(0, *x.shape) for x in state)

    return decomposed


def decompositions() -> dict[Any, Decomposition]:
    """What ``ExportedProgram.run_decompositions`` needs to replace the ops."""
    return {op.forward_op: _decomposition(op) for op in TABLE.values() if op.backend_at_runtime}
