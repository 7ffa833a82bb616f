"""Learning along the tokens in PyTorch's own operations, for programs that run without us.

The mini-batches are a ``scan``, a loop of the graph itself, so that the number of tokens may stay
free. A Python loop would be unrolled at one length and be wrong, silently, at every other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._higher_order_ops import scan

State = tuple[Tensor, ...]
Step = Callable[[State, Sequence[Tensor], Tensor, Tensor], tuple[State, Tensor]]
"""One mini-batch of b tokens in dual form.

From the state, (q, k, v [B, H, b, d], eta [B, H, b]), p [H, b, 1] and the last token's p [H, 1, 1]
to the next state and o [B, H, b, d].
"""


def detached(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors cut off from autograd, which a scan of inference is to know nothing of."""
    return tuple(None if x is None else x.detach() for x in tensors)


def learn_by_scan(
    step: Step,
    views: Sequence[Tensor],
    state: Sequence[Tensor],
    position_scale: Tensor | None,
    mini_batch_size: int,
    reverse_heads: int,
) -> tuple[Tensor, ...]:
    """o [B, T, H, d] and the last state [B, H, …]; no gradient follows.

    A short last mini-batch is filled up with tokens that are learnt from at rate 0.

    Args:
        step: one mini-batch. A dimension of one that it needs it makes itself: a loop takes those
            of its inputs for any number.
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
    # Of each mini-batch its last token's p, by which the state is stepped: [N, H].
    starts = mini_batch_size * torch.arange(count, device=q.device)
    p_last = p[:, (length - starts).clamp(max=mini_batch_size) - 1].transpose(0, 1)

    def one_mini_batch(state: State, inputs: Sequence[Tensor]) -> tuple[State, Tensor]:
        *tokens, last = inputs
        return step(state, tokens, p.unsqueeze(-1), last[:, None, None])

    # Copies, because what goes round in a scan may be no view of an input.
    beginning = tuple(
        x.to(dtype).expand(batch, *x.shape[-rank:]).clone()
        for x, rank in zip(state, (3, 2) * (len(state) // 2), strict=True)
    )
    tokens = (_mini_batches(x.to(dtype), count, mini_batch_size, reverse_heads) for x in views)
    # After a scan of another op, PyTorch would make inputs of numbers that are the code's.
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        end, o = scan(one_mini_batch, beginning, (*tokens, p_last))
    o = o.permute(1, 0, 3, 2, 4).reshape(batch, count * mini_batch_size, heads, dim)
    return _scan_order(o[:, :length], reverse_heads).to(q.dtype), *end


def _mini_batches(x: Tensor, count: int, size: int, reverse_heads: int) -> Tensor:
    """x [B, T, H, ...] in scan order, filled up with zeros, as [N, B, H, b, ...]."""
    batch, _, *rest = x.shape
    x = torch.cat([_scan_order(x, reverse_heads), x.new_zeros(batch, size, *rest)], dim=1)
    x = x[:, : count * size].reshape(batch, count, size, *rest)
    return x.transpose(0, 1).transpose(2, 3)


def _scan_order(x: Tensor, reverse_heads: int) -> Tensor:
    """x [B, T, H, ...] with the last heads' tokens from T to 1, or back again."""
    if not reverse_heads:
        return x
    forward_heads = x.shape[2] - reverse_heads
    return torch.cat([x[:, :, :forward_heads], x[:, :, forward_heads:].flip(1)], dim=2)
