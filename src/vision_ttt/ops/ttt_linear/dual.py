"""TTT-Linear in its dual form: only matrix products, no per-token weights.

Papers: TTT, Sec. 2.5 and Eq. 7-8; Vision-TTT, Appendix A.2. Per head and mini-batch of n tokens,
with G the rows η_t g_t, P = diag(p) and A the lower triangle of Q Kᵀ + 1 (the 1 carries the bias):

    Z_q = Q W + b - P A G
    W ← W - p_n Kᵀ G,    b ← b - p_n Σ G

This folder's README derives the backward pass. It recomputes every intermediate from the states
that the forward pass saved, one per 4 d tokens, so that the saved states are never larger than q.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vision_ttt.ops._op import Backend
from vision_ttt.ops.ttt_linear.contract import Inputs
from vision_ttt.ops.ttt_linear.inner_model import (
    InnerNorm,
    inner_gradient,
    inner_gradient_backward,
    inner_output,
    inner_output_backward,
)
from vision_ttt.ops.ttt_linear.scan_order import mini_batches, put, take


def checkpoint_interval(dim: int, mini_batch_size: int) -> int:
    """The number of mini-batches between two saved states: d² numbers per at least 4 d tokens.

    The saved states therefore use at most a quarter of a view's memory. The backward pass holds the
    states of one interval at a time.
    """
    return 4 * -(-dim // mini_batch_size)


def num_checkpoints(length: int, dim: int, mini_batch_size: int) -> int:
    """The number of states that a forward pass saves. It does not save the initial state."""
    tokens_per_state = mini_batch_size * checkpoint_interval(dim, mini_batch_size)
    return (length - 1) // tokens_per_state


def _position_scale(scale: Tensor | None, n: int, dtype: torch.dtype, like: Tensor) -> Tensor:
    """p_1 … p_n as [H or 1, n, 1]."""
    if scale is None:
        return like.new_ones(1, n, 1, dtype=dtype)
    return scale.to(dtype)[..., :n].reshape(-1, n, 1)


def _initial_state(w0: Tensor, b0: Tensor, batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """W [B, H, d, d] and b [B, H, 1, d] before the first mini-batch."""
    w = w0.to(dtype).expand(batch, *w0.shape[-3:])
    b = b0.to(dtype).expand(batch, *b0.shape[-2:]).unsqueeze(2)
    return w, b


def ttt_linear_dual(
    inputs: Inputs, save_states: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute o [B, T, H, d], the final W [B, H, d, d] and b [B, H, d], and the saved states.

    The saved states are W [N, B, H, d, d] and b [N, B, H, d], N = 0 unless ``save_states``.
    """
    q, k, v, eta, w0, b0, ln_weight, ln_bias, position_scale, *options = inputs
    mini_batch_size, reverse_heads, eps = options
    batch, length, heads, dim = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    norm = InnerNorm.of(ln_weight, ln_bias, eps, dtype)
    w, b = _initial_state(w0, b0, batch, dtype)
    interval = checkpoint_interval(dim, mini_batch_size)
    count = num_checkpoints(length, dim, mini_batch_size) if save_states else 0
    o = q.new_empty(batch, length, heads, dim)
    kept_w = w.new_empty(count, batch, heads, dim, dim)
    kept_b = b.new_empty(count, batch, heads, dim)

    for index, (start, stop) in enumerate(mini_batches(length, mini_batch_size)):
        if save_states and index and index % interval == 0:
            kept_w[index // interval - 1] = w
            kept_b[index // interval - 1] = b.squeeze(2)
        q_t, k_t, v_t, eta_t = (
            take(x, start, stop, reverse_heads).to(dtype) for x in (q, k, v, eta)
        )  # [B, H, n, d], eta [B, H, n]
        p_t = _position_scale(position_scale, stop - start, dtype, q)  # [H, n, 1]

        step = eta_t.unsqueeze(-1) * inner_gradient(k_t @ w + b, k_t, v_t, norm)
        attention = (q_t @ k_t.transpose(-1, -2) + 1).tril()  # [B, H, n, n]
        z_q = q_t @ w + b - p_t * (attention @ step)
        put(o, inner_output(q_t, z_q, norm).to(q.dtype), start, stop, reverse_heads)

        p_last = p_t[:, -1:]  # [H, 1, 1]
        w = w - p_last * (k_t.transpose(-1, -2) @ step)
        b = b - p_last * step.sum(2, keepdim=True)
    # Elementwise results inherit the strides of w0, but the op returns contiguous tensors.
    return o, w.contiguous(), b.squeeze(2).contiguous(), kept_w, kept_b


def ttt_linear_dual_backward(
    inputs: Inputs, grad_o: Tensor, grad_w: Tensor, grad_b: Tensor, kept_w: Tensor, kept_b: Tensor
) -> tuple[Tensor, ...]:
    """Pull gradients of o, W and b back to the nine tensors from q to position_scale.

    A gradient has the dtype and the shape of its tensor; the gradient of None is an empty tensor.
    """
    q, k, v, eta, w0, b0, ln_weight, ln_bias, position_scale, *options = inputs
    mini_batch_size, reverse_heads, eps = options
    batch, length, heads, dim = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    norm = InnerNorm.of(ln_weight, ln_bias, eps, dtype)
    w_first, b_first = _initial_state(w0, b0, batch, dtype)
    interval = checkpoint_interval(dim, mini_batch_size)
    pieces = list(mini_batches(length, mini_batch_size))

    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    deta = eta.new_empty(eta.shape)
    dw = grad_w.to(dtype)  # [B, H, d, d]
    db = grad_b.to(dtype).unsqueeze(2)  # [B, H, 1, d]
    dweight = q.new_zeros(heads, dim, dtype=dtype)
    dbias = q.new_zeros(heads, dim, dtype=dtype)
    scale_length = 0 if position_scale is None else mini_batch_size
    dscale = q.new_zeros(heads, scale_length, dtype=dtype)

    def load(start: int, stop: int, *tensors: Tensor) -> list[Tensor]:
        return [take(x, start, stop, reverse_heads).to(dtype) for x in tensors]

    for segment in reversed(range(0, len(pieces), interval)):
        # Replay the segment's states from the saved one.
        kept = segment // interval - 1
        state = (w_first, b_first) if segment == 0 else (kept_w[kept], kept_b[kept].unsqueeze(2))
        states = [state]
        members = pieces[segment : segment + interval]
        for start, stop in members[:-1]:
            w, b = states[-1]
            k_t, v_t, eta_t = load(start, stop, k, v, eta)
            p_last = _position_scale(position_scale, stop - start, dtype, q)[:, -1:]
            step = eta_t.unsqueeze(-1) * inner_gradient(k_t @ w + b, k_t, v_t, norm)
            w_next = w - p_last * (k_t.transpose(-1, -2) @ step)
            states.append((w_next, b - p_last * step.sum(2, keepdim=True)))

        for (start, stop), (w, b) in zip(reversed(members), reversed(states), strict=True):
            q_t, k_t, v_t, eta_t, do_t = load(start, stop, q, k, v, eta, grad_o)
            p_t = _position_scale(position_scale, stop - start, dtype, q)
            p_last = p_t[:, -1:]
            w_transposed = w.transpose(-1, -2)

            # The forward pass, again.
            z_k = k_t @ w + b
            g_t = inner_gradient(z_k, k_t, v_t, norm)
            step = eta_t.unsqueeze(-1) * g_t
            attention = (q_t @ k_t.transpose(-1, -2) + 1).tril()
            update = attention @ step
            z_q = q_t @ w + b - p_t * update

            # o = f(q), z_q = q W + b - p (A G)
            through_f = inner_output_backward(do_t, z_q, norm)
            dz_q = through_f.z
            dupdate = -p_t * dz_q
            dattention = (dupdate @ step.transpose(-1, -2)).tril()
            dq_t = dz_q @ w_transposed + dattention @ k_t
            if through_f.x is not None:
                dq_t = dq_t + through_f.x

            # W ← W - p_n Kᵀ G, b ← b - p_n Σ G
            k_dw = k_t @ dw + db  # [B, H, n, d]
            dstep = attention.transpose(-1, -2) @ dupdate - p_last * k_dw
            dk_t = dattention.transpose(-1, -2) @ q_t - p_last * (step @ dw.transpose(-1, -2))
            if position_scale is not None:
                dscale[:, : stop - start] -= (dz_q * update).sum((0, 3))
                dscale[:, stop - start - 1] -= (k_dw * step).sum((0, 2, 3))

            # G = η g(z_k, k, v), z_k = k W + b
            deta_t = (dstep * g_t).sum(-1)
            through_g = inner_gradient_backward(eta_t.unsqueeze(-1) * dstep, z_k, k_t, v_t, norm)
            dz_k = through_g.z
            dk_t = dk_t + dz_k @ w_transposed
            if through_g.k is not None:
                dk_t = dk_t + through_g.k

            dw = dw + q_t.transpose(-1, -2) @ dz_q + k_t.transpose(-1, -2) @ dz_k
            db = db + (dz_q + dz_k).sum(2, keepdim=True)
            for through in (through_f, through_g):
                if through.norm_weight is not None and through.norm_bias is not None:
                    dweight += through.norm_weight
                    dbias += through.norm_bias
            for grad, piece in ((dq, dq_t), (dk, dk_t), (dv, through_g.v), (deta, deta_t)):
                put(grad, piece.to(grad.dtype), start, stop, reverse_heads)

    def of(grad: Tensor, like: Tensor | None) -> Tensor:
        if like is None:
            return q.new_empty(0)
        return grad.sum_to_size(like.shape).to(like.dtype).contiguous()

    return (
        dq,
        dk,
        dv,
        deta,
        of(dw, w0),
        of(db.squeeze(2), b0),
        of(dweight, ln_weight),
        of(dbias, ln_bias),
        of(dscale, position_scale),
    )


BACKEND = Backend(ttt_linear_dual, ttt_linear_dual_backward, lambda inputs: None)
