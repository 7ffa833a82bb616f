"""TTT-MLP in PyTorch's own operations: its dual form in a loop that is part of the graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vision_ttt.ops import _graph_loop
from vision_ttt.ops._graph_loop import detached
from vision_ttt.ops._learner_scan import learn_by_scan
from vision_ttt.ops.ttt_linear.inner_model import InnerNorm, inner_output
from vision_ttt.ops.ttt_mlp.contract import Inputs
from vision_ttt.ops.ttt_mlp.inner_model import State, gelu, inner_step
from vision_ttt.ops.ttt_mlp.layer import Layer, read, write


def ttt_mlp_scan(inputs: Inputs) -> tuple[Tensor, ...]:
    """o and the last state of :func:`vision_ttt.ops.ttt_mlp`, without gradients."""
    q, k, v, eta, w1, b1, w2, b2, ln_weight, ln_bias, position_scale, *options = inputs
    mini_batch_size, reverse_heads, eps = options
    dtype = torch.promote_types(q.dtype, torch.float32)
    ln_weight, ln_bias = detached(ln_weight, ln_bias)

    def step(
        state: _graph_loop.State, tokens: Sequence[Tensor], p: Tensor, last: Tensor
    ) -> tuple[_graph_loop.State, Tensor]:
        norm = InnerNorm.of(ln_weight, ln_bias, eps, dtype)
        w1, b1, w2, b2 = state[0], state[1].unsqueeze(2), state[2], state[3].unsqueeze(2)
        q, k, v, eta = tokens
        inner = inner_step(k, v, State(w1, b1, w2, b2), norm)
        g1, g2 = eta.unsqueeze(-1) * inner.g1, eta.unsqueeze(-1) * inner.g2
        x2_q = gelu(read(Layer(q, k, g1, w1, b1, p)).z_q)
        z2_q = read(Layer(x2_q, inner.x2, g2, w2, b2, p)).z_q
        o = inner_output(q, z2_q, norm)
        w1, b1 = write(k, g1, w1, b1, last)
        w2, b2 = write(inner.x2, g2, w2, b2, last)
        return (w1, b1.squeeze(2), w2, b2.squeeze(2)), o

    return learn_by_scan(
        step, (q, k, v, eta), (w1, b1, w2, b2), position_scale, mini_batch_size, reverse_heads
    )
