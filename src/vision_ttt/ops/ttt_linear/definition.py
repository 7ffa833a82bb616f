"""The definition of TTT-Linear in its primal form: the specification of every other backend.

Written to be read against the papers (TTT, Sec. 2.1-2.4 and Eq. 6; Vision-TTT, Eq. 1-7): one
gradient per token, one set of weights per token, the gradient computed by automatic differentiation
of the loss. It is slow, needs O(T d²) memory per head and supports every floating dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vision_ttt.ops._learner_scan_order import in_scan_order, mini_batches, take
from vision_ttt.ops.ttt_linear.contract import Inputs


def layer_norm(z: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over the last axis of z [B, H, n, d] with per-head weight and bias [H, 1, d]."""
    centred = z - z.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)  # Tensor.var warns where there is no image
    return centred / torch.sqrt(variance + eps) * weight + bias


def ttt_linear_definition(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (o [B, T, H, d], W [B, H, d, d], b [B, H, d]); see :func:`ttt_linear`."""
    q, k, v, eta, w0, b0, ln_weight, ln_bias, position_scale, *options = inputs
    mini_batch_size, reverse_heads, eps = options
    batch, length, heads, dim = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)

    def f(x: Tensor, z: Tensor) -> Tensor:
        """The inner model's output for input x, given z = x W + b: [B, H, n, d]."""
        if ln_weight is None or ln_bias is None:
            return z
        gain, offset = (p.to(dtype).unsqueeze(1) for p in (ln_weight, ln_bias))  # [H, 1, d]
        return x + layer_norm(z, gain, offset, eps)

    w = w0.to(dtype).expand(batch, heads, dim, dim)
    b = b0.to(dtype).expand(batch, heads, dim)

    outputs = []
    for start, stop in mini_batches(length, mini_batch_size):
        q_t, k_t, v_t, eta_t = (
            take(x, start, stop, reverse_heads).to(dtype) for x in (q, k, v, eta)
        )  # [B, H, n, d], eta [B, H, n]
        if position_scale is None:
            p_t = w.new_ones(stop - start)
        else:
            p_t = position_scale[..., : stop - start].to(dtype)  # [n] or [H, n]

        def loss(z: Tensor, k_t: Tensor = k_t, v_t: Tensor = v_t) -> Tensor:
            return 0.5 * (f(k_t, z) - v_t).square().sum()

        z_t = k_t @ w + b.unsqueeze(-2)
        # A token's loss depends on its own z only, so the gradient of the sum is per token.
        g_t = torch.func.grad(loss)(z_t)  # [B, H, n, d]

        step = eta_t.unsqueeze(-1) * g_t
        w_sum = (k_t.unsqueeze(-1) * step.unsqueeze(-2)).cumsum(2)  # [B, H, n, d, d]
        b_sum = step.cumsum(2)  # [B, H, n, d]
        w_t = w.unsqueeze(2) - p_t[..., None, None] * w_sum
        b_t = b.unsqueeze(2) - p_t[..., None] * b_sum

        z_t = (q_t.unsqueeze(-2) @ w_t).squeeze(-2) + b_t
        outputs.append(f(q_t, z_t).transpose(1, 2))
        w, b = w_t[:, :, -1], b_t[:, :, -1]

    o = in_scan_order(torch.cat(outputs, dim=1), reverse_heads)  # [B, T, H, d]
    return o.to(q.dtype), w, b
