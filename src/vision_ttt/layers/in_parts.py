"""Work on some tokens after the others, where that keeps what lies between near the cores."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from vision_ttt.layers.overwriting import may_overwrite
from vision_ttt.layers.plain_calls import is_plain

TOKENS_AT_ONCE = 1024
"""Inference on a CPU takes so many at a time."""


def in_parts(
    function: Callable[..., Tensor], *tokens: Tensor, producers: tuple[nn.Module, ...]
) -> Tensor:
    """function(*tokens), a function of each token by itself.

    The C library hands large blocks back to the system, page by page; parts reuse theirs.

    Args:
        function: tensors [B, t, …] → [B, t, D].
        tokens: each [B, T, …].
        producers: the linear layers that the function calls. Where one of them is replaced or
            watched, or autograd or torch.compile is at work, everything is done at once.
    """
    length = tokens[0].shape[1]
    if not (
        may_overwrite()
        and tokens[0].is_cpu
        and length > TOKENS_AT_ONCE
        and all(is_plain(producer, nn.Linear) for producer in producers)
    ):
        return function(*tokens)
    out = None
    for start in range(0, length, TOKENS_AT_ONCE):
        part = slice(start, start + TOKENS_AT_ONCE)
        result = function(*(x[:, part] for x in tokens))
        if out is None:
            out = result.new_empty(result.shape[0], length, result.shape[2])
        out[:, part] = result
    return out
