"""The state of ttt_linear between two tokens, and its dual form on a part of a mini-batch."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from vision_ttt.ops import states
from vision_ttt.ops._learner_mini_batches import Part, Tensors
from vision_ttt.ops.ttt_linear.contract import Inputs
from vision_ttt.ops.ttt_linear.inner_model import InnerNorm, inner_gradient, inner_output


class LinearState(NamedTuple):
    """What :func:`vision_ttt.ops.ttt_linear` needs to go on after any token, in float32 at least.

    ``w`` [B, H, d, d] and ``b`` [B, H, d] are W_T and b_T, as the last token sees them. ``start_w``
    and ``start_b`` are W' and b' before the mini-batch of that token, ``sum_w`` and ``sum_b`` its
    Σ η_s k_sᵀ g_s and Σ η_s g_s, ``position`` the number of its tokens: 0 where the last
    mini-batch is complete, in which case w is start_w. Sequences at different places of their
    mini-batches have a position each, [B]; they go on token by token. The rest is None where heads
    scan in two directions, and such a state does not go on.
    """

    w: Tensor
    b: Tensor
    start_w: Tensor | None = None
    start_b: Tensor | None = None
    sum_w: Tensor | None = None
    sum_b: Tensor | None = None
    position: int | Tensor | None = None

    detach = states.detach
    select = states.select
    tensors = states.tensors
    to = states.to


def ttt_linear_mini_batch(
    part: Part, start: Tensors, sums: Tensors, inputs: Inputs
) -> tuple[Tensor, Tensors]:
    """o [B, H, n, d] of tokens of one mini-batch, and its sums after them.

    With S, s the sums before the tokens, otherwise as in :mod:`vision_ttt.ops.ttt_linear.dual`::

        Z_q = Q W + b − P (A G + Q S + s),    S ← S + Kᵀ G,    s ← s + Σ G
    """
    q, k, v, eta, p = part
    w, b = start[0], start[1].unsqueeze(2)
    sum_w, sum_b = sums
    norm = InnerNorm.of(inputs.ln_weight, inputs.ln_bias, inputs.eps, q.dtype)
    g = eta.unsqueeze(-1) * inner_gradient(k @ w + b, k, v, norm)
    attention = (q @ k.transpose(-1, -2) + 1).tril()  # [B, H, n, n]
    update = attention @ g + q @ sum_w + sum_b.unsqueeze(2)
    o = inner_output(q, q @ w + b - p * update, norm)
    return o, (sum_w + k.transpose(-1, -2) @ g, sum_b + g.sum(2))
