"""ttt_linear in PyTorch's own operations: a loop over the mini-batches that is part of the graph.

A runtime pays for every operation of every step, so that a step holds few, and what does not depend
on the state is outside. Per head and mini-batch of n tokens, with X = (k, 1), X_q = (q, 1),
X_η = -η X, θ = (W; b), G the rows ∂loss/∂z at θ, P = diag(p) and ⊿ the lower triangle:

    Z_q = X_q θ + P ⊿(X_q X_ηᵀ) G
    θ ← θ + p_n X_ηᵀ G

and f(q) of Z_q is computed after the loop. With an inner norm, the rows of θ have mean 0 in the
loop: the norm does not see their means, which no gradient changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops._graph_loop import MiniBatchRows, State, detached, graph_loop
from vision_ttt.ops._learner_dual import with_batch
from vision_ttt.ops.ttt_linear.contract import Inputs


def ttt_linear_loop(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (o [B, T, H, d], W [B, H, d, d], b [B, H, d]), without gradients.

    A short last mini-batch is filled with its last token at a learning rate of 0. Tokens of zeros
    would leave z = b, and where b is constant the inner norm has no value if eps is 0.
    """
    dtype = torch.promote_types(inputs.q.dtype, torch.float32)
    tensors = (None if x is None else x.to(dtype) for x in detached(*inputs[:9]))
    q, k, v, eta, w0, b0, gain, offset, scale = tensors
    size, reverse_heads, eps = inputs[9:]
    batch, _, heads, dim = q.shape
    normed = gain is not None and offset is not None

    rows = MiniBatchRows.of(q, size, reverse_heads)
    w, b = with_batch((w0, b0), batch)
    start = torch.cat([w, b.unsqueeze(2)], dim=2)  # θ [B, H, d + 1, d]
    target, means = v, torch.zeros_like(start[..., :1])
    if normed:
        means = start.mean(-1, keepdim=True)
        # γ (f(k) - v) = γ² x̂ + γ (k + β - v), whose second part needs no state.
        squared = gain.square()
        target = gain * (k + offset - v)
    p = q.new_ones(size, dtype=dtype) if scale is None else scale
    p = p.expand(heads, size)
    triangle = p.unsqueeze(-1) * p.new_ones(size, size).tril()  # P ⊿ [H, b, b]
    # p of each mini-batch's last token: [N, H].
    p_last = p[:, rows.filled.sum((1, 2, 3)) - 1].transpose(0, 1)

    def one_mini_batch(state: State, parts: Sequence[Tensor]) -> tuple[State, Tensor]:
        (theta,), (x_q, x, x_eta, target, p_last) = state, parts
        z = x @ theta
        if normed:
            x_hat, _, inverse_std = torch.native_layer_norm(z, (dim,), None, None, eps)
            g = x_hat * squared.unsqueeze(1) + target
            g = g - g.mean(-1, keepdim=True)
            g = (g - x_hat * (g * x_hat).mean(-1, keepdim=True)) * inverse_std
        else:
            g = z - target
        x_eta = x_eta.transpose(-1, -2)
        z_q = x_q @ theta + (x_q @ x_eta * triangle) @ g
        return (theta + x_eta @ (p_last.unsqueeze(-1).unsqueeze(-1) * g),), z_q

    x_q, x = (rows.mini_batches(F.pad(view, (0, 1), value=1)) for view in (q, k))
    rates = (rows.mini_batches(eta) * rows.filled).unsqueeze(-1)
    parts = x_q, x, -rates * x, rows.mini_batches(target), p_last
    (end,), z = graph_loop(one_mini_batch, (start - means,), parts)
    o = rows.sequence(z)
    if normed:
        o = q + F.layer_norm(o, (dim,), eps=eps) * gain + offset
    end = end + means
    return o.to(inputs.q.dtype), end[:, :, :dim].clone(), end[:, :, dim].clone()
