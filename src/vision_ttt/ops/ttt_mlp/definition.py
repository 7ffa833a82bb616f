"""The definition of TTT-MLP in its primal form: the specification of every other backend.

Written to be read against the TTT paper (Sec. 2.1-2.4 and Eq. 6; Sec. 2.7 for the MLP; Appendix
A.2): one gradient per token, one inner model per token, the gradient with respect to all four of
its tensors computed by automatic differentiation of the loss. It is slow, needs O(T d²) memory per
head and supports every floating dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops._learner_scan_order import in_scan_order, mini_batches, take
from vision_ttt.ops.ttt_linear.definition import layer_norm
from vision_ttt.ops.ttt_mlp.contract import Inputs


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x W + b of every token [B, H, n, i] with its own W [B, H, n, i, j] and b [B, H, n, j]."""
    return (x.unsqueeze(-2) @ weight).squeeze(-2) + bias


def ttt_mlp_definition(inputs: Inputs) -> tuple[Tensor, ...]:
    """Compute o [B, T, H, d] and the final w1, b1, w2, b2 with a leading B; see :func:`ttt_mlp`."""
    q, k, v, eta, w1, b1, w2, b2, ln_weight, ln_bias, position_scale, *options = inputs
    mini_batch_size, reverse_heads, eps = options
    batch, length, heads, _ = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)

    def f(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        """The inner model's output for x [B, H, n, d], every token with its own weights."""
        z = _linear(F.gelu(_linear(x, w1, b1), approximate="tanh"), w2, b2)
        if ln_weight is None or ln_bias is None:
            return z
        gain, offset = (p.to(dtype).unsqueeze(1) for p in (ln_weight, ln_bias))  # [H, 1, d]
        return x + layer_norm(z, gain, offset, eps)

    state = tuple(  # [B, H, …]
        x.to(dtype).expand(batch, heads, *x.shape[-rank:])
        for x, rank in ((w1, 2), (b1, 1), (w2, 2), (b2, 1))
    )
    outputs = []
    for start, stop in mini_batches(length, mini_batch_size):
        q_t, k_t, v_t, eta_t = (
            take(x, start, stop, reverse_heads).to(dtype) for x in (q, k, v, eta)
        )  # [B, H, n, d], eta [B, H, n]
        n = stop - start
        p_t = q_t.new_ones(n) if position_scale is None else position_scale[..., :n].to(dtype)

        def loss(state_t: tuple[Tensor, ...], k_t: Tensor = k_t, v_t: Tensor = v_t) -> Tensor:
            return 0.5 * (f(k_t, *state_t) - v_t).square().sum()

        # A copy of the state per token [B, H, n, …], so that gradients are per token.
        copies = tuple(x.unsqueeze(2).expand(batch, heads, n, *x.shape[2:]) for x in state)
        gradients = torch.func.grad(loss)(copies)

        def over(factor: Tensor, x: Tensor) -> Tensor:
            """Reshape a factor [n], [H, n] or [B, H, n] to multiply x [B, H, n, …]."""
            return factor.reshape(*factor.shape, *[1] * (x.ndim - 3))

        state_t = tuple(
            x - over(p_t, g) * (over(eta_t, g) * g).cumsum(2)
            for x, g in zip(copies, gradients, strict=True)
        )
        outputs.append(f(q_t, *state_t).transpose(1, 2))
        state = tuple(x[:, :, -1] for x in state_t)

    o = in_scan_order(torch.cat(outputs, dim=1), reverse_heads)  # [B, T, H, d]
    return o.to(q.dtype), *state
