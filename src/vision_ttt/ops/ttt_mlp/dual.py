"""TTT-MLP in its dual form: only matrix products, no per-token weights.

Papers: TTT, Appendix A.3 and A.4, layer by layer as in :mod:`vision_ttt.ops.ttt_mlp.layer`. This
folder's README derives the backward pass. It recomputes every intermediate from the states that the
forward pass saved, one per 8 d tokens, so that the saved states are about as large as q.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vision_ttt.ops._op import Backend
from vision_ttt.ops.ttt_linear.inner_model import (
    InnerNorm,
    inner_gradient_backward,
    inner_output,
    inner_output_backward,
)
from vision_ttt.ops.ttt_linear.scan_order import mini_batches, put, take
from vision_ttt.ops.ttt_mlp.contract import Inputs
from vision_ttt.ops.ttt_mlp.inner_model import (
    InnerStep,
    State,
    gelu,
    gelu_derivative,
    gelu_second_derivative,
    inner_step,
)
from vision_ttt.ops.ttt_mlp.layer import Layer, layer_backward, read, write


def checkpoint_interval(dim: int, mini_batch_size: int) -> int:
    """The number of mini-batches between two saved states: 8 d² + 5 d numbers per ≥ 8 d tokens.

    The saved states therefore use about one view's memory. The backward pass holds the states of
    one interval at a time.
    """
    return 8 * -(-dim // mini_batch_size)


def num_checkpoints(length: int, dim: int, mini_batch_size: int) -> int:
    """The number of states that a forward pass saves. It does not save the initial state."""
    tokens_per_state = mini_batch_size * checkpoint_interval(dim, mini_batch_size)
    return (length - 1) // tokens_per_state


def _position_scale(scale: Tensor | None, n: int, dtype: torch.dtype, like: Tensor) -> Tensor:
    """p_1 … p_n as [H or 1, n, 1]."""
    if scale is None:
        return like.new_ones(1, n, 1, dtype=dtype)
    return scale.to(dtype)[..., :n].reshape(-1, n, 1)


def _steps(inner: InnerStep, eta: Tensor) -> tuple[Tensor, Tensor]:
    """G of both layers for the rates eta [B, H, n]."""
    return eta.unsqueeze(-1) * inner.g1, eta.unsqueeze(-1) * inner.g2


def _advance(
    k: Tensor, inner: InnerStep, steps: tuple[Tensor, Tensor], state: State, p: Tensor
) -> State:
    """The state after a mini-batch."""
    w1, b1, w2, b2 = state
    return State(*write(k, steps[0], w1, b1, p), *write(inner.x2, steps[1], w2, b2, p))


def ttt_mlp_dual(inputs: Inputs, save_states: bool) -> tuple[Tensor, ...]:
    """Compute o [B, T, H, d], the final state with a leading B, and the saved states.

    The saved states are w1, b1, w2, b2 with a leading [N, B], N = 0 unless ``save_states``.
    """
    q, k, v, eta, w1, b1, w2, b2, ln_weight, ln_bias, position_scale, *options = inputs
    mini_batch_size, reverse_heads, eps = options
    batch, length, heads, dim = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    norm = InnerNorm.of(ln_weight, ln_bias, eps, dtype)
    state = State.initial(w1, b1, w2, b2, batch, dtype)
    interval = checkpoint_interval(dim, mini_batch_size)
    count = num_checkpoints(length, dim, mini_batch_size) if save_states else 0
    o = q.new_empty(batch, length, heads, dim)
    kept = State(*(x.new_empty(count, *x.shape) for x in state))

    for index, (start, stop) in enumerate(mini_batches(length, mini_batch_size)):
        if save_states and index and index % interval == 0:
            for memory, x in zip(kept, state, strict=True):
                memory[index // interval - 1] = x
        q_t, k_t, v_t, eta_t = (
            take(x, start, stop, reverse_heads).to(dtype) for x in (q, k, v, eta)
        )  # [B, H, n, d], eta [B, H, n]
        p_t = _position_scale(position_scale, stop - start, dtype, q)

        inner = inner_step(k_t, v_t, state, norm)
        steps = _steps(inner, eta_t)
        x2_q = gelu(read(Layer(q_t, k_t, steps[0], state.w1, state.b1, p_t)).z_q)
        z2_q = read(Layer(x2_q, inner.x2, steps[1], state.w2, state.b2, p_t)).z_q
        put(o, inner_output(q_t, z2_q, norm).to(q.dtype), start, stop, reverse_heads)
        state = _advance(k_t, inner, steps, state, p_t)

    # Elementwise results inherit the strides of the initial state, but the op returns contiguous
    # tensors.
    final = (state.w1, state.b1.squeeze(2), state.w2, state.b2.squeeze(2))
    memories = (kept.w1, kept.b1.squeeze(3), kept.w2, kept.b2.squeeze(3))
    return o, *(x.contiguous() for x in final), *memories


def ttt_mlp_dual_backward(
    inputs: Inputs,
    grad_o: Tensor,
    grad_w1: Tensor,
    grad_b1: Tensor,
    grad_w2: Tensor,
    grad_b2: Tensor,
    kept_w1: Tensor,
    kept_b1: Tensor,
    kept_w2: Tensor,
    kept_b2: Tensor,
) -> tuple[Tensor, ...]:
    """Pull gradients of o and the final state back to the eleven tensors from q to position_scale.

    A gradient has the dtype and the shape of its tensor; the gradient of None is an empty tensor.
    """
    q, k, v, eta, w1, b1, w2, b2, ln_weight, ln_bias, position_scale, *options = inputs
    mini_batch_size, reverse_heads, eps = options
    batch, length, heads, dim = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    norm = InnerNorm.of(ln_weight, ln_bias, eps, dtype)
    first = State.initial(w1, b1, w2, b2, batch, dtype)
    interval = checkpoint_interval(dim, mini_batch_size)
    pieces = list(mini_batches(length, mini_batch_size))

    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    deta = eta.new_empty(eta.shape)
    dstate = State.initial(grad_w1, grad_b1, grad_w2, grad_b2, batch, dtype)
    dweight = q.new_zeros(heads, dim, dtype=dtype)
    dbias = q.new_zeros(heads, dim, dtype=dtype)
    scale_length = 0 if position_scale is None else mini_batch_size
    dscale = q.new_zeros(heads, scale_length, dtype=dtype)

    def load(start: int, stop: int, *tensors: Tensor) -> list[Tensor]:
        return [take(x, start, stop, reverse_heads).to(dtype) for x in tensors]

    for segment in reversed(range(0, len(pieces), interval)):
        # Replay the segment's states from the saved one.
        kept = segment // interval - 1
        states = [first]
        if segment:
            memories = (kept_w1[kept], kept_b1[kept], kept_w2[kept], kept_b2[kept])
            states = [State.initial(*memories, batch, dtype)]
        members = pieces[segment : segment + interval]
        for start, stop in members[:-1]:
            k_t, v_t, eta_t = load(start, stop, k, v, eta)
            p_t = _position_scale(position_scale, stop - start, dtype, q)
            inner = inner_step(k_t, v_t, states[-1], norm)
            states.append(_advance(k_t, inner, _steps(inner, eta_t), states[-1], p_t))

        for (start, stop), state in zip(reversed(members), reversed(states), strict=True):
            q_t, k_t, v_t, eta_t, do_t = load(start, stop, q, k, v, eta, grad_o)
            p_t = _position_scale(position_scale, stop - start, dtype, q)

            # The forward pass, again.
            inner = inner_step(k_t, v_t, state, norm)
            step1, step2 = _steps(inner, eta_t)
            layer1 = Layer(q_t, k_t, step1, state.w1, state.b1, p_t)
            reading1 = read(layer1)
            layer2 = Layer(gelu(reading1.z_q), inner.x2, step2, state.w2, state.b2, p_t)
            reading2 = read(layer2)

            # o = f(q), through both layers as the test views see them.
            through_f = inner_output_backward(do_t, reading2.z_q, norm)
            back2 = layer_backward(through_f.z, dstate.w2, dstate.b2, layer2, reading2)
            dz1_q = back2.x_q * gelu_derivative(reading1.z_q)
            back1 = layer_backward(dz1_q, dstate.w1, dstate.b1, layer1, reading1)
            dq_t, dk_t = back1.x_q, back1.x
            if through_f.x is not None:
                dq_t = dq_t + through_f.x
            if position_scale is not None:
                dscale[:, : stop - start] += back1.scale + back2.scale

            # G = η g in both layers; g1 = e1 σ'(z1) with e1 = g2 W2ᵀ
            deta_t = (back1.step * inner.g1).sum(-1) + (back2.step * inner.g2).sum(-1)
            dg1 = eta_t.unsqueeze(-1) * back1.step
            slope = gelu_derivative(inner.z1)
            de1 = dg1 * slope
            dg2 = eta_t.unsqueeze(-1) * back2.step + de1 @ state.w2

            # g2 = g(z2, k, v), z2 = x2 W2 + b2, x2 = σ(z1), z1 = k W1 + b1
            through_g = inner_gradient_backward(dg2, inner.z2, k_t, v_t, norm)
            dz2 = through_g.z
            dx2 = back2.x + dz2 @ state.w2.transpose(-1, -2)
            dz1 = dx2 * slope + dg1 * inner.e1 * gelu_second_derivative(inner.z1)
            dk_t = dk_t + dz1 @ state.w1.transpose(-1, -2)
            if through_g.k is not None:
                dk_t = dk_t + through_g.k

            x2_transposed = inner.x2.transpose(-1, -2)
            dstate = State(
                w1=back1.w + k_t.transpose(-1, -2) @ dz1,
                b1=back1.b + dz1.sum(2, keepdim=True),
                w2=back2.w + x2_transposed @ dz2 + de1.transpose(-1, -2) @ inner.g2,
                b2=back2.b + dz2.sum(2, keepdim=True),
            )
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
        of(dstate.w1, w1),
        of(dstate.b1.squeeze(2), b1),
        of(dstate.w2, w2),
        of(dstate.b2.squeeze(2), b2),
        of(dweight, ln_weight),
        of(dbias, ln_bias),
        of(dscale, position_scale),
    )


BACKEND = Backend(ttt_mlp_dual, ttt_mlp_dual_backward, lambda inputs: None)
