"""selective_scan in PyTorch's own operations: a loop over the tokens that is part of the graph."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops._graph_loop import State, detached, graph_loop
from vision_ttt.ops._learner_scan_order import in_scan_order
from vision_ttt.ops.selective_scan.contract import Inputs, num_groups


def selective_scan_loop(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Compute (y [B, T, D], the last state [B, D, N]), without gradients.

    See :func:`vision_ttt.ops.selective_scan`. Channels are G groups of M, and a group scans in one
    direction: where the only one serves both, it is divided.
    """
    dtype = torch.promote_types(inputs.u.dtype, torch.float32)
    tensors = (None if x is None else x.to(dtype) for x in detached(*inputs[:9]))
    u, delta, a, b, c, skip, z, delta_bias, state = tensors
    batch, _, channels = u.shape
    per_group = math.gcd(channels // num_groups(b), inputs.reverse_channels)
    groups, reverse_groups = channels // per_group, inputs.reverse_channels // per_group

    if delta_bias is not None:
        delta = delta + delta_bias
    if inputs.delta_softplus:
        # Not logaddexp as in the definition: that of ONNX overflows, and is 0 for small steps.
        delta = F.softplus(delta, threshold=_SOFTPLUS_IS_X)
    if state is None:
        state = u.new_zeros(batch, *a.shape)
    # A scan's state keeps its strides, and those of its sums would be A's.
    a = a.unflatten(0, (groups, per_group)).contiguous()  # [G, M, N]

    def one_token(state: State, token: Sequence[Tensor]) -> tuple[State, Tensor]:
        step, update, b, c = token  # [B, G, M] twice, [B, G, N] twice
        decay = torch.exp(step.unsqueeze(-1) * a)
        h = decay * state[0] + update.unsqueeze(-1) * b.unsqueeze(2)  # [B, G, M, N]
        return (h,), (h * c.unsqueeze(2)).sum(-1)

    steps, updates = (x.unflatten(2, (groups, per_group)) for x in (delta, delta * u))
    rows = (x if x.ndim == 4 else x.unsqueeze(2) for x in (b, c))
    tokens = (steps, updates, *(x.expand(-1, -1, groups, -1) for x in rows))
    # Copies, because the tensors of a scan must not be views of others.
    tokens = tuple(in_scan_order(x, reverse_groups).transpose(0, 1).clone() for x in tokens)
    beginning = state.unflatten(1, (groups, per_group)).clone()
    (end,), y = graph_loop(one_token, (beginning,), tokens)
    y = in_scan_order(y.transpose(0, 1), reverse_groups).flatten(2)
    if skip is not None:
        y = y + skip * u
    if z is not None:
        y = y * F.silu(z)
    return y.to(inputs.u.dtype), end.flatten(1, 2)


_SOFTPLUS_IS_X = 40.0
"""Above it ln(1 + e^x) is x in float64, too."""
