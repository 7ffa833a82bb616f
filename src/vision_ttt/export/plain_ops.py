"""The ops as PyTorch's own operations, for programs that run without this package.

An op of ``vision_ttt.ops`` is opaque to ``torch.export``; these decompositions take its place. The
mini-batches are a ``scan``, a loop of the graph itself, so that the number of tokens may stay free:
a Python loop would be unrolled at one length and be wrong, silently, at every other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops import scan

from vision_ttt.ops.ttt_linear.inner_model import InnerNorm, inner_gradient, inner_output


def ttt_linear_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    w0: Tensor,
    b0: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    position_scale: Tensor | None,
    mini_batch_size: int,
    reverse_heads: int,
    eps: float,
    save_states: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """:func:`vision_ttt.ops.ttt_linear` in its dual form; inference only, no state is kept.

    Arguments and results are those of the custom op ``vision_ttt::ttt_linear``; the backend makes
    no difference. A short last mini-batch is filled up with tokens that are learnt from at rate 0.
    """
    assert not save_states, "exported without gradients"
    batch, length, heads, dim = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    norm = InnerNorm.of(ln_weight, ln_bias, eps, dtype)
    count = (length + mini_batch_size - 1) // mini_batch_size
    if position_scale is None:
        position_scale = q.new_ones(mini_batch_size, dtype=dtype)
    p = position_scale.to(dtype).reshape(-1, mini_batch_size, 1)  # [H or 1, b, 1]
    # Of each mini-batch its last token's p, by which the state is stepped: [N, H or 1, 1, 1].
    starts = mini_batch_size * torch.arange(count, device=q.device)
    p_last = p[:, (length - starts).clamp(max=mini_batch_size) - 1].transpose(0, 1).unsqueeze(-1)

    def step(
        state: tuple[Tensor, Tensor], tokens: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, Tensor], Tensor]:
        w, b = state
        q_t, k_t, v_t, eta_t, p_end = tokens  # [B, H, b, d], eta [B, H, b]
        g = eta_t.unsqueeze(-1) * inner_gradient(k_t @ w + b, k_t, v_t, norm)
        attention = (q_t @ k_t.transpose(-1, -2) + 1).tril()
        o_t = inner_output(q_t, q_t @ w + b - p * (attention @ g), norm)
        w = w - p_end * (k_t.transpose(-1, -2) @ g)
        b = b - p_end * g.sum(2, keepdim=True)
        return (w, b), o_t

    # Copies, because what goes round in a scan may be no view of an input.
    w = w0.to(dtype).expand(batch, *w0.shape[-3:]).clone()
    b = b0.to(dtype).expand(batch, *b0.shape[-2:]).unsqueeze(2).clone()
    views = tuple(
        _mini_batches(x.to(dtype), count, mini_batch_size, reverse_heads) for x in (q, k, v, eta)
    )
    (w, b), o = scan(step, (w, b), (*views, p_last))
    o = o.permute(1, 0, 3, 2, 4).reshape(batch, count * mini_batch_size, heads, dim)
    o = _scan_order(o[:, :length], reverse_heads).to(q.dtype)
    return o, w, b.squeeze(2), w.new_empty(0, *w.shape), b.new_empty(0, batch, heads, dim)


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


def decompositions() -> dict[Any, Callable[..., Any]]:
    """What ``ExportedProgram.run_decompositions`` needs to replace the ops."""
    return {torch.ops.vision_ttt.ttt_linear.default: ttt_linear_scan}
