"""The state of ttt_mlp between two tokens, and its dual form on a part of a mini-batch."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from vision_ttt.ops import states
from vision_ttt.ops._learner_mini_batches import Part, Tensors
from vision_ttt.ops.ttt_linear.inner_model import InnerNorm, inner_output
from vision_ttt.ops.ttt_mlp.contract import Inputs
from vision_ttt.ops.ttt_mlp.inner_model import State, gelu, inner_step
from vision_ttt.ops.ttt_mlp.layer import Layer, read


class MLPState(NamedTuple):
    """What :func:`vision_ttt.ops.ttt_mlp` needs to go on after any token, in float32 at least.

    ``w1`` [B, H, d, 4d], ``b1`` [B, H, 4d], ``w2`` [B, H, 4d, d] and ``b2`` [B, H, d] are θ_T, as
    the last token sees them. The fields of ``start_`` are θ' before the mini-batch of that token,
    those of ``sum_`` its Σ η_s ∂ℓ_s/∂θ', ``position`` the number of its tokens: 0 where the last
    mini-batch is complete, in which case θ_T is θ'. Sequences at different places of their
    mini-batches have a position each, [B]; they go on token by token. The rest is None where heads
    scan in two directions, and such a state does not go on.
    """

    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor
    start_w1: Tensor | None = None
    start_b1: Tensor | None = None
    start_w2: Tensor | None = None
    start_b2: Tensor | None = None
    sum_w1: Tensor | None = None
    sum_b1: Tensor | None = None
    sum_w2: Tensor | None = None
    sum_b2: Tensor | None = None
    position: int | Tensor | None = None

    detach = states.detach
    select = states.select
    tensors = states.tensors
    to = states.to


def ttt_mlp_mini_batch(
    part: Part, start: Tensors, sums: Tensors, inputs: Inputs
) -> tuple[Tensor, Tensors]:
    """o [B, H, n, d] of tokens of one mini-batch, and its sums after them.

    Of each layer, with S, s the sums before the tokens, otherwise as in
    :mod:`vision_ttt.ops.ttt_mlp.layer`::

        Z_q = X_q W + b − P (A G + X_q S + s),    S ← S + Xᵀ G,    s ← s + Σ G
    """
    q, k, v, eta, p = part
    w1, b1, w2, b2 = start[0], start[1].unsqueeze(2), start[2], start[3].unsqueeze(2)
    sum_w1, sum_b1, sum_w2, sum_b2 = sums
    norm = InnerNorm.of(inputs.ln_weight, inputs.ln_bias, inputs.eps, q.dtype)
    inner = inner_step(k, v, State(w1, b1, w2, b2), norm)
    g1, g2 = eta.unsqueeze(-1) * inner.g1, eta.unsqueeze(-1) * inner.g2
    z1_q = read(Layer(q, k, g1, w1, b1, p)).z_q - p * (q @ sum_w1 + sum_b1.unsqueeze(2))
    x2_q = gelu(z1_q)
    z2_q = read(Layer(x2_q, inner.x2, g2, w2, b2, p)).z_q
    z2_q = z2_q - p * (x2_q @ sum_w2 + sum_b2.unsqueeze(2))
    sums = (
        sum_w1 + k.transpose(-1, -2) @ g1,
        sum_b1 + g1.sum(2),
        sum_w2 + inner.x2.transpose(-1, -2) @ g2,
        sum_b2 + g2.sum(2),
    )
    return inner_output(q, z2_q, norm), sums
