"""ttt_mlp in PyTorch's own operations: a loop over the mini-batches that is part of the graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vision_ttt.ops._graph_loop import MiniBatchRows, State, detached, graph_loop
from vision_ttt.ops._learner_dual import Part, after, initial_state, mini_batch, with_batch
from vision_ttt.ops._learner_inner_model import InnerNorm
from vision_ttt.ops.ttt_mlp.contract import Inputs


def ttt_mlp_loop(inputs: Inputs) -> tuple[Tensor, ...]:
    """Compute o [B, T, H, d] and the last state [B, H, …], without gradients.

    A short last mini-batch is filled with its last token at a learning rate of 0. Tokens of zeros
    would leave z = b, and where b is constant the inner norm has no value if eps is 0.
    """
    inputs = Inputs(*detached(*inputs[:-3]), *inputs[-3:])
    q, size, reverse_heads = inputs.q, inputs.mini_batch_size, inputs.reverse_heads
    batch, _, heads, _ = q.shape
    rows = MiniBatchRows.of(q, size, reverse_heads)
    dtype = torch.promote_types(q.dtype, torch.float32)
    scale = inputs.position_scale
    scale = q.new_ones(size, dtype=dtype) if scale is None else scale.to(dtype)
    p = scale.expand(heads, size)
    # p of each mini-batch's last token, which scales the update of the state: [N, H].
    p_last = p[:, rows.filled.sum((1, 2, 3)) - 1].transpose(0, 1)

    def one_mini_batch(state: State, slices: Sequence[Tensor]) -> tuple[State, Tensor]:
        *tokens, last = slices
        norm = InnerNorm.of(inputs.ln_weight, inputs.ln_bias, inputs.eps, dtype)
        o, sums = mini_batch(Part(*tokens, p.unsqueeze(-1)), state, None, norm)
        return after(state, sums, last), o

    # Copies, because the carried tensors of a scan must not be views of an input.
    beginning = tuple(x.to(dtype).clone() for x in with_batch(initial_state(inputs), batch))
    *views, eta = (rows.mini_batches(x.to(dtype)) for x in inputs[:4])
    end, o = graph_loop(one_mini_batch, beginning, (*views, eta * rows.filled, p_last))
    return rows.sequence(o).to(q.dtype), *end
