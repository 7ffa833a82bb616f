"""The inner learner's loss and gradient of every token, for explanation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vision_ttt.ops.ttt_linear.contract import CONTRACTS, Inputs
from vision_ttt.ops.ttt_linear.dual import ttt_linear_dual
from vision_ttt.ops.ttt_linear.inner_model import InnerNorm, inner_gradient, inner_output
from vision_ttt.ops.ttt_linear.scan_order import mini_batches, put, take


class InnerTrace(NamedTuple):
    """Per-token record of one ttt_linear call, each [B, T, H] in token order.

    ``loss`` is ½‖f(k_t; W') − v_t‖² with W' the state before token t's mini-batch, and
    ``gradient_norm`` the Frobenius norm of G_t = ∂loss/∂W' = k_tᵀ g_t (Vision-TTT, Eq. 6), which is
    ‖k_t‖ ‖g_t‖. ``initial_loss`` and ``initial_gradient_norm`` are the same at the initial state,
    before any step on the image.
    """

    loss: Tensor
    gradient_norm: Tensor
    initial_loss: Tensor
    initial_gradient_norm: Tensor


@torch.no_grad()
def ttt_linear_trace(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    w0: Tensor,
    b0: Tensor,
    ln_weight: Tensor | None = None,
    ln_bias: Tensor | None = None,
    *,
    mini_batch_size: int = 16,
    position_scale: Tensor | None = None,
    reverse_heads: int = 0,
    eps: float = 1e-6,
) -> InnerTrace:
    """Trace the inner learner on the arguments of :func:`ttt_linear`, without gradients.

    Raises:
        TypeError, ValueError: as :func:`ttt_linear`.
    """
    tensors = (q, k, v, eta, w0, b0, ln_weight, ln_bias, position_scale)
    CONTRACTS.public.check(Inputs(*tensors, mini_batch_size, reverse_heads, eps))
    dtype = torch.promote_types(q.dtype, torch.float32)
    trace = InnerTrace(*(q.new_empty(q.shape[:3], dtype=dtype) for _ in InnerTrace._fields))
    norm = InnerNorm.of(ln_weight, ln_bias, eps, dtype)
    w_first, b_first = w0.to(dtype), b0.to(dtype).unsqueeze(-2)
    w, b = w0, b0
    with torch.autocast(q.device.type, enabled=False):
        for start, stop in mini_batches(q.shape[1], mini_batch_size):
            q_t, k_t, v_t, eta_t = (take(x, start, stop, reverse_heads) for x in (q, k, v, eta))
            k_f, v_f = k_t.to(dtype), v_t.to(dtype)  # [B, H, n, d]
            records = []
            for state in ((w.to(dtype), b.to(dtype).unsqueeze(-2)), (w_first, b_first)):
                z = k_f @ state[0] + state[1]
                g = inner_gradient(z, k_f, v_f, norm)
                records.append(0.5 * (inner_output(k_f, z, norm) - v_f).square().sum(-1))
                records.append(k_f.norm(dim=-1) * g.norm(dim=-1))
            pieces = InnerTrace(*records)
            for record, piece in zip(trace, pieces, strict=True):
                put(record, piece, start, stop, reverse_heads)
            # The op itself advances the state by one mini-batch in scan order.
            views = (x.transpose(1, 2) for x in (q_t, k_t, v_t, eta_t))
            scale = None if position_scale is None else position_scale[..., : stop - start]
            inputs = Inputs(*views, w, b, ln_weight, ln_bias, scale, stop - start, 0, eps)
            _, w, b, _, _ = ttt_linear_dual(inputs, save_states=False)
    return trace
