"""Calls of a learner op in one piece, whose last mini-batch the kernels run, too."""

from typing import Any

from torch import Tensor

from vision_ttt.ops._table import TABLE


def in_one_call(
    op: str,
    *,
    mini_batch_size: int = 16,
    reverse_heads: int = 0,
    eps: float = 1e-6,
    backend: str | None = None,
    return_state: bool,
    **tensors: Tensor,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """o and the state after the last token, as the op's backend gives them."""
    assert return_state
    inputs: Any = TABLE[op].inputs
    options = {"mini_batch_size": mini_batch_size, "reverse_heads": reverse_heads, "eps": eps}
    given = dict.fromkeys(inputs._fields) | tensors | options
    o, *state = TABLE[op](inputs(**given), backend)
    return o, tuple(state)
