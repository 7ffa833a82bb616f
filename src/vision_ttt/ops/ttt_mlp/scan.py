"""ttt_mlp in PyTorch's own operations: a loop over the mini-batches that is part of the graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vision_ttt.ops._graph_loop import State, detached, graph_loop, in_scan_order
from vision_ttt.ops._learner_dual import Part, after, initial_state, mini_batch, with_batch
from vision_ttt.ops._learner_inner_model import InnerNorm
from vision_ttt.ops.ttt_mlp.contract import Inputs


def ttt_mlp_loop(inputs: Inputs) -> tuple[Tensor, ...]:
    """Compute o [B, T, H, d] and the last state [B, H, …], without gradients.

    A short last mini-batch is padded with tokens of ones whose learning rate is 0. Tokens of zeros
    would leave z = b, and where b is constant the inner norm has no value if eps is 0.
    """
    inputs = Inputs(*detached(*inputs[:-3]), *inputs[-3:])
    q, size, reverse_heads = inputs.q, inputs.mini_batch_size, inputs.reverse_heads
    batch, length, heads, dim = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    count = (length + size - 1) // size
    scale = inputs.position_scale
    scale = q.new_ones(size, dtype=dtype) if scale is None else scale.to(dtype)
    p = scale.expand(heads, size)
    # p of each mini-batch's last token, which scales the update of the state: [N, H].
    starts = size * torch.arange(count, device=q.device)
    p_last = p[:, (length - starts).clamp(max=size) - 1].transpose(0, 1)

    def one_mini_batch(state: State, slices: Sequence[Tensor]) -> tuple[State, Tensor]:
        *tokens, last = slices
        norm = InnerNorm.of(inputs.ln_weight, inputs.ln_bias, inputs.eps, dtype)
        o, sums = mini_batch(Part(*tokens, p.unsqueeze(-1)), state, None, norm)
        return after(state, sums, last), o

    # Copies, because the carried tensors of a scan must not be views of an input.
    beginning = tuple(x.to(dtype).clone() for x in with_batch(initial_state(inputs), batch))
    tokens = (
        _mini_batches(x.to(dtype), count, size, reverse_heads, fill)
        for x, fill in zip(inputs[:4], (1, 1, 1, 0), strict=True)
    )
    end, o = graph_loop(one_mini_batch, beginning, (*tokens, p_last))
    o = o.permute(1, 0, 3, 2, 4).reshape(batch, count * size, heads, dim)
    return in_scan_order(o[:, :length], reverse_heads).to(q.dtype), *end


def _mini_batches(x: Tensor, count: int, size: int, reverse_heads: int, fill: int) -> Tensor:
    """x [B, T, H, ...] in scan order, padded with a value, as [N, B, H, b, ...]."""
    batch, _, *rest = x.shape
    x = torch.cat([in_scan_order(x, reverse_heads), x.new_full((batch, size, *rest), fill)], dim=1)
    x = x[:, : count * size].reshape(batch, count, size, *rest)
    return x.transpose(0, 1).transpose(2, 3)
