"""Loops over a sequence in PyTorch's own operations, for programs that run without this package.

Such a loop is a ``scan``, which is part of the graph, so that the number of tokens may be dynamic.
A Python loop would be unrolled for one length and silently wrong for all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import CodeType

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import reset_code
from torch._higher_order_ops import scan

State = tuple[Tensor, ...]


def graph_loop(
    step: Callable[[State, Sequence[Tensor]], tuple[State, Tensor]],
    beginning: State,
    inputs: Sequence[Tensor],
) -> tuple[State, Tensor]:
    """Compute the last state, and the outputs of all steps [S, …].

    Args:
        step: (state, each input's slice) → (next state, output). It must create dimensions of size
            1 itself: the scan treats those of its inputs as dynamic.
        beginning: the state before the first step, no view of another tensor.
        inputs: [S, …] each, detached as the beginning is: the scan is for inference only.
    """
    if not torch.compiler.is_dynamo_compiling():
        _forget_traced_loops()
    # After a scan of another op, PyTorch would turn constants of the code into dynamic inputs.
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        return scan(step, beginning, tuple(inputs))


def _forget_traced_loops() -> None:
    """Remove what Dynamo keeps of earlier scans.

    Its comparison of an earlier scan's fixed sizes with dynamic ones would fix these, too.
    """
    for code in scan.__code__.co_consts:
        if isinstance(code, CodeType):
            reset_code(code)


def detached(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors detached from autograd."""
    return tuple(None if x is None else x.detach() for x in tensors)


def in_scan_order(x: Tensor, reverse: int) -> Tensor:
    """x [B, T, H, …] with the tokens of the last ``reverse`` of H reversed; its own inverse."""
    if not reverse:
        return x
    forward = x.shape[2] - reverse
    return torch.cat([x[:, :, :forward], x[:, :, forward:].flip(1)], dim=2)
