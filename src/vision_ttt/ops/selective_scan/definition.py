"""The definition of selective_scan: one token after the other, in PyTorch's operations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops._learner_scan_order import in_scan_order
from vision_ttt.ops.selective_scan.contract import Inputs, num_groups


def softplus(x: Tensor) -> Tensor:
    """ln(1 + e^x), without overflow and with the exact derivative σ(x) everywhere."""
    return torch.logaddexp(x, x.new_zeros(()))


def selective_scan_definition(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Compute (y [B, T, D], the last state [B, D, N]); see :func:`selective_scan`."""
    dtype = torch.promote_types(inputs.u.dtype, torch.float32)
    tensors = (None if x is None else x.to(dtype) for x in inputs[:9])
    u, delta, a, b, c, skip, z, delta_bias, state = tensors
    _, length, channels = u.shape
    forward = channels - inputs.reverse_channels
    per_group = channels // num_groups(b)

    def token(x: Tensor, step: int) -> Tensor:
        """The token of x [B, T, D] that each channel has come to: [B, D]."""
        return torch.cat([x[:, step, :forward], x[:, length - 1 - step, forward:]], dim=1)

    def token_of_groups(x: Tensor, step: int) -> Tensor:
        """The same of x [B, T, N] or [B, T, G, N], for each channel: [B, D, N]."""
        one, other = (
            x[:, t].unflatten(-1, (-1, a.shape[1])).flatten(1, -2).repeat_interleave(per_group, 1)
            for t in (step, length - 1 - step)
        )
        return torch.cat([one[:, :forward], other[:, forward:]], dim=1)

    if delta_bias is not None:
        delta = delta + delta_bias
    if inputs.delta_softplus:
        delta = softplus(delta)
    if state is None:
        state = u.new_zeros(u.shape[0], *a.shape)
    outputs = []
    for step in range(length):
        delta_t = token(delta, step)[..., None]  # [B, D, 1]
        update = delta_t * token_of_groups(b, step) * token(u, step)[..., None]
        state = torch.exp(delta_t * a) * state + update  # [B, D, N]
        outputs.append((state * token_of_groups(c, step)).sum(-1))
    y = in_scan_order(torch.stack(outputs, dim=1), inputs.reverse_channels)  # [B, T, D]
    if skip is not None:
        y = y + skip * u
    if z is not None:
        y = y * F.silu(z)
    return y.to(inputs.u.dtype), state
