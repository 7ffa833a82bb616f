"""Decompositions of the ops into PyTorch's own operations, for programs without this package.

An op of ``vision_ttt.ops`` is opaque to ``torch.export``, and these decompositions replace it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from vision_ttt.ops._op import Op
from vision_ttt.ops._table import TABLE

Decomposition = Callable[..., tuple[Tensor, ...]]


def _decomposition(op: Op) -> Decomposition:
    """The op as a scan, with its custom op's arguments. The backend is ignored."""

    def decomposed(*arguments: Any) -> tuple[Tensor, ...]:
        *problem, save_states, _ = arguments
        assert not save_states, "exported without gradients"
        o, *state = op.exported(op.inputs(*problem))
        return o, *state, *(x.new_empty(0, *x.shape) for x in state)

    return decomposed


def decompositions() -> dict[Any, Decomposition]:
    """Op → decomposition, for ``ExportedProgram.run_decompositions``."""
    return {op.forward_op: _decomposition(op) for op in TABLE.values() if op.backend_at_runtime}
