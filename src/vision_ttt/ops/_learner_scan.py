"""The learner ops in PyTorch's own operations: a loop over mini-batches, part of the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vision_ttt.ops._graph_loop import State, detached, graph_loop, in_scan_order

Step = Callable[[State, Sequence[Tensor], Tensor, Tensor], tuple[State, Tensor]]
"""One mini-batch of b tokens in dual form.

From the state, (q, k, v [B, H, b, d], eta [B, H, b]), p [H, b, 1] and the last token's p [H, 1, 1]
to the next state and o [B, H, b, d].
"""


def learn_by_scan(
    step: Step,
    views: Sequence[Tensor],
    state: Sequence[Tensor],
    position_scale: Tensor | None,
    mini_batch_size: int,
    reverse_heads: int,
) -> tuple[Tensor, ...]:
    """Compute o [B, T, H, d] and the last state [B, H, …], without gradients.

    A short last mini-batch is padded with tokens of ones whose learning rate is 0. Tokens of zeros
    would leave z = b, and where b is constant the inner norm has no value if eps is 0.

    Args:
        step: one mini-batch, as of :func:`vision_ttt.ops._graph_loop.graph_loop`.
        views: q, k, v [B, T, H, d] and eta [B, T, H].
        state: of each layer its weight [H, i, j] and its bias [H, j], or with a leading B.
        position_scale: p [b] or [H, b]; None for ones.
        mini_batch_size: b.
        reverse_heads: the last this-many heads scan from T to 1.
    """
    views, state = detached(*views), detached(*state)
    q = views[0]
    batch, length, heads, dim = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    count = (length + mini_batch_size - 1) // mini_batch_size
    if position_scale is None:
        position_scale = q.new_ones(mini_batch_size, dtype=dtype)
    p = position_scale.detach().to(dtype).expand(heads, mini_batch_size)
    # p of each mini-batch's last token, which scales the update of the state: [N, H].
    starts = mini_batch_size * torch.arange(count, device=q.device)
    p_last = p[:, (length - starts).clamp(max=mini_batch_size) - 1].transpose(0, 1)

    def one_mini_batch(state: State, inputs: Sequence[Tensor]) -> tuple[State, Tensor]:
        *tokens, last = inputs
        return step(state, tokens, p.unsqueeze(-1), last[:, None, None])

    # Copies, because the carried tensors of a scan must not be views of an input.
    beginning = tuple(
        x.to(dtype).expand(batch, *x.shape[-rank:]).clone()
        for x, rank in zip(state, (3, 2) * (len(state) // 2), strict=True)
    )
    tokens = (
        _mini_batches(x.to(dtype), count, mini_batch_size, reverse_heads, fill)
        for x, fill in zip(views, (1, 1, 1, 0), strict=True)
    )
    end, o = graph_loop(one_mini_batch, beginning, (*tokens, p_last))
    o = o.permute(1, 0, 3, 2, 4).reshape(batch, count * mini_batch_size, heads, dim)
    return in_scan_order(o[:, :length], reverse_heads).to(q.dtype), *end


def _mini_batches(x: Tensor, count: int, size: int, reverse_heads: int, fill: int) -> Tensor:
    """x [B, T, H, ...] in scan order, padded with a value, as [N, B, H, b, ...]."""
    batch, _, *rest = x.shape
    x = torch.cat([in_scan_order(x, reverse_heads), x.new_full((batch, size, *rest), fill)], dim=1)
    x = x[:, : count * size].reshape(batch, count, size, *rest)
    return x.transpose(0, 1).transpose(2, 3)
