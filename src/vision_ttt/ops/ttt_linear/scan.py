"""TTT-Linear in PyTorch's own operations: its dual form in a loop that is part of the graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vision_ttt.ops._graph_loop import State, detached
from vision_ttt.ops._learner_scan import learn_by_scan
from vision_ttt.ops.ttt_linear.contract import Inputs
from vision_ttt.ops.ttt_linear.inner_model import InnerNorm, inner_gradient, inner_output


def ttt_linear_scan(inputs: Inputs) -> tuple[Tensor, ...]:
    """o and the last W, b of :func:`vision_ttt.ops.ttt_linear`, without gradients."""
    q, k, v, eta, w0, b0, ln_weight, ln_bias, position_scale, *options = inputs
    mini_batch_size, reverse_heads, eps = options
    dtype = torch.promote_types(q.dtype, torch.float32)
    ln_weight, ln_bias = detached(ln_weight, ln_bias)

    def step(
        state: State, tokens: Sequence[Tensor], p: Tensor, last: Tensor
    ) -> tuple[State, Tensor]:
        norm = InnerNorm.of(ln_weight, ln_bias, eps, dtype)
        w, b = state[0], state[1].unsqueeze(2)
        q, k, v, eta = tokens
        g = eta.unsqueeze(-1) * inner_gradient(k @ w + b, k, v, norm)
        attention = (q @ k.transpose(-1, -2) + 1).tril()
        o = inner_output(q, q @ w + b - p * (attention @ g), norm)
        w = w - last * (k.transpose(-1, -2) @ g)
        b = b - last * g.sum(2, keepdim=True)
        return (w, b.squeeze(2)), o

    return learn_by_scan(
        step, (q, k, v, eta), (w0, b0), position_scale, mini_batch_size, reverse_heads
    )
