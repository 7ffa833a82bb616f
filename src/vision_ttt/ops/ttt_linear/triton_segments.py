"""First backward kernel of ttt_linear for GPUs: everything that depends on the states only.

One program per saved state and segment of the sequence, in parallel. For the second kernel they
write, per token, x̂ (z without norm), ∂Z_q, and the attention's shares of ∂K, ∂G and ∂p. This
folder's README has the derivation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vision_ttt.ops.ttt_linear.triton_tiles import (
    by_rows,
    dot,
    end_mini_batch,
    load_bias,
    load_state,
    load_tokens,
    locate,
    product,
    project,
    standardise,
    store_state,
    store_tokens,
    tiles_of,
    turned,
)
from vision_ttt.ops.ttt_linear.triton_tuning import PLAIN, Tuned


# fmt: off
@triton.jit(do_not_specialize=[*PLAIN, "states"])
def segments_kernel(
    q, k, v, eta, w0, b0, ln_weight, ln_bias, scale, grad_o, kept_w, kept_b,
    dq, dk_share, dg_share, dz_q_out, x_out, norm_out, w_end, w_before, dweight, dbias, dscale,
    q_strides, k_strides, v_strides, grad_strides, state_batch, scale_head,
    length, heads, reverse_heads, mini_batch_size, interval, states, eps,
    DIM: tl.constexpr, TILE: tl.constexpr, SEVERAL: tl.constexpr,
    OPERAND: tl.constexpr, PARTS: tl.constexpr, TRANSPOSED: tl.constexpr,
):
    # fmt: on
    program = tl.program_id(0).to(tl.int64)
    segment, state = program // states, program % states
    batch, head = state // heads, state % heads
    reverse = head >= heads - reverse_heads
    j = tl.arange(0, DIM)
    place = tl.arange(0, TILE)

    if segment == 0:
        start_w = w0 + (batch * state_batch + head) * DIM * DIM
        start_b = b0 + (batch * state_batch + head) * DIM
    else:
        start_w = kept_w + ((segment - 1) * states + state) * DIM * DIM
        start_b = kept_b + ((segment - 1) * states + state) * DIM
    w = load_state(start_w, DIM, TRANSPOSED)
    b = load_bias(start_b, DIM, TILE, TRANSPOSED)
    # As in the forward kernel: W before the mini-batch is in memory, the tiles' updates are in w.
    PART_SCALED: tl.constexpr = SEVERAL and scale is not None
    b_now = b
    if SEVERAL:
        w_before += program * DIM * DIM
        store_state(w_before, w, DIM, TRANSPOSED)
        tl.debug_barrier()
    if PART_SCALED:
        w, b_now = tl.zeros_like(w), tl.zeros_like(b)
    # A cast, because Triton 3.8 interprets no constants in bfloat16.
    ones = tl.full([TILE, TILE], 1.0, tl.float32).to(OPERAND)
    if ln_weight is not None:
        ln_weight += head * DIM
        ln_bias += head * DIM
    # Without a norm the rounding errors of W and G accumulate along the sequence, see the README.
    SPLIT: tl.constexpr = ln_weight is None
    if scale is not None:
        scale += head * scale_head
        p = tl.load(scale + place, mask=place < mini_batch_size, other=0.0)
        p_full = tl.load(scale + mini_batch_size - 1)
        p_last = tl.load(scale + (length - 1) % mini_batch_size)
    # One row per token of a tile, summed at the end, because a sum over tokens involves all warps.
    dgain = tl.zeros([TILE, DIM], tl.float32)
    doffset = tl.zeros([TILE, DIM], tl.float32)

    q += batch * q_strides[0] + head * q_strides[2]
    k += batch * k_strides[0] + head * k_strides[2]
    v += batch * v_strides[0] + head * v_strides[2]
    grad_o += batch * grad_strides[0] + head * grad_strides[2]

    # Exact products need the registers: tiles that are used late are then loaded late.
    LATE: tl.constexpr = PARTS == 2
    tiles = tiles_of(length, mini_batch_size, TILE)
    begin = segment.to(tl.int32) * interval * tl.cdiv(mini_batch_size, TILE)
    end = tl.minimum(begin + interval * tl.cdiv(mini_batch_size, TILE), tiles)
    for number in tl.range(begin, end, num_stages=1):
        part, token, valid, last = locate(number, mini_batch_size, length, reverse, TILE, SEVERAL)
        here = (batch * length + token) * heads + head  # in contiguous [B, T, H]
        q_t = load_tokens(q, token * q_strides[1], valid, DIM)
        k_t = load_tokens(k, token * k_strides[1], valid, DIM)
        v_t = load_tokens(v, token * v_strides[1], valid, DIM)
        eta_t = tl.load(eta + here, mask=valid, other=0.0)
        if not LATE:
            do_t = load_tokens(grad_o, token * grad_strides[1], valid, DIM).to(tl.float32)
        # Issue the loads of all tiles first. Otherwise each tile is copied to shared memory before
        # the next load is issued.
        q_t, k_t = by_rows(q_t, k_t)

        # The forward pass, again.
        square = tl.zeros([TILE, TILE], tl.float32)
        wide = turned(tl.zeros([TILE, DIM], tl.float32), TRANSPOSED)
        causal = place[:, None] <= place[None, :]
        w_held = load_state(w_before, DIM, TRANSPOSED) if SEVERAL else w
        x = product(k_t, turned(w_held, TRANSPOSED), b, OPERAND, PARTS, TRANSPOSED, SPLIT)
        x, k_t = by_rows(turned(x, TRANSPOSED), k_t)
        if ln_weight is not None:
            gain = tl.load(ln_weight + j)[None, :]
            offset = tl.load(ln_bias + j)[None, :]
            x, r = standardise(x, valid, eps, DIM)
            error = x * gain + offset + (k_t.to(tl.float32) - v_t.to(tl.float32))
            g, mean_ux = project(error * gain, x, DIM)
            g *= (-r * eta_t)[:, None]
            tl.store(norm_out + here * 2, r, mask=valid)
            tl.store(norm_out + here * 2 + 1, mean_ux, mask=valid)
        else:
            g = (v_t.to(tl.float32) - x) * eta_t[:, None]
        store_tokens(x_out, here * DIM, valid, x, DIM)
        down = g if SPLIT else g.to(OPERAND)  # -G
        push = down  # -p_n G
        if scale is not None and not SEVERAL:
            g *= p_last if (number + 1) * mini_batch_size > length else p_full
            push = g if SPLIT else g.to(OPERAND)

        # o = f(q), Z_q = Q W + b - P A G
        # Both branches compute Aᵀ. Each is the one that was measured to need fewer registers.
        if SEVERAL:
            attention = dot(k_t, tl.trans(q_t), square, OPERAND, PARTS) + 1.0
        else:
            attention = tl.trans(dot(q_t, tl.trans(k_t), square, OPERAND, PARTS)) + 1.0
        attention = tl.where(causal, attention, 0.0)  # Aᵀ [s, t]
        scaled = attention
        if PART_SCALED:
            p = tl.load(scale + part + place, mask=valid, other=0.0)
        if scale is not None:
            scaled = p[None, :] * attention
        w_t = turned(w, TRANSPOSED)
        z_q = product(q_t, w_t, b_now if SEVERAL else b, OPERAND, PARTS, TRANSPOSED, SPLIT)
        if PART_SCALED:
            moved = z_q
            w_held = load_state(w_before, DIM, TRANSPOSED)
            z_q = product(q_t, w_held, b, OPERAND, PARTS, TRANSPOSED, SPLIT)
            z_q += p[:, None] * moved
            moved, _ = by_rows(moved, q_t)
        z_q = product(tl.trans(scaled), down, z_q, OPERAND, PARTS, TRANSPOSED, SPLIT)
        z_q, _ = by_rows(turned(z_q, TRANSPOSED), q_t)
        if LATE:
            do_t = load_tokens(grad_o, token * grad_strides[1], valid, DIM).to(tl.float32)
        dz_q = do_t
        if ln_weight is not None:
            gain = tl.load(ln_weight + j)[None, :]
            x_q, r = standardise(z_q, valid, eps, DIM)
            dz_q, _ = project(do_t * gain, x_q, DIM)
            dz_q *= r[:, None]
            dgain += do_t * x_q
            doffset += do_t
        store_tokens(dz_q_out, here * DIM, valid, dz_q, DIM)
        if PART_SCALED:
            dp = tl.sum(dz_q * moved, axis=1)
        dz_q = dz_q.to(OPERAND)
        dg_t = product(scaled, dz_q, wide, OPERAND, PARTS, TRANSPOSED)
        store_tokens(dg_share, here * DIM, valid, turned(-dg_t, TRANSPOSED), DIM)
        dattention = dot(down, tl.trans(dz_q), square, OPERAND, PARTS)  # -G ∂Z_qᵀ [s, t]
        if scale is not None:
            dp_t = tl.sum(dattention * attention, axis=0)
            if PART_SCALED:
                dp_t += dp
            tl.store(dscale + here, dp_t, mask=valid)
            dattention *= p[None, :]
        dattention = tl.where(causal, dattention, 0.0)  # ∂Aᵀ
        dq_t = product(dz_q, tl.trans(w_t), wide, OPERAND, PARTS, TRANSPOSED)
        if PART_SCALED:
            w_held = load_state(w_before, DIM, TRANSPOSED)
            dq_t = product(dz_q, tl.trans(w_held), dq_t * p[:, None], OPERAND, PARTS, TRANSPOSED)
        dq_t = product(tl.trans(dattention), k_t, dq_t, OPERAND, PARTS, TRANSPOSED)
        dq_t, _ = by_rows(turned(dq_t, TRANSPOSED), q_t)
        if ln_weight is not None:
            dq_t += do_t
        store_tokens(dq, here * DIM, valid, dq_t, DIM)
        dk_t = product(dattention, q_t, wide, OPERAND, PARTS, TRANSPOSED)
        store_tokens(dk_share, here * DIM, valid, turned(dk_t, TRANSPOSED), DIM)

        # W ← W - p_n Kᵀ G, b ← b - p_n Σ G
        w = product(tl.trans(k_t), push, w, OPERAND, PARTS, TRANSPOSED, SPLIT)
        if SEVERAL:
            b_now = product(ones, push, b_now, OPERAND, PARTS, TRANSPOSED, SPLIT)
            if last:
                p_n = 1.0
                if PART_SCALED:
                    p_n = p_last if number + 1 == tiles else p_full
                w, b, b_now = end_mini_batch(w_before, w, b, b_now, p_n, DIM, PART_SCALED)
        else:
            b = product(ones, push, b, OPERAND, PARTS, TRANSPOSED, SPLIT)

    if end == tiles:
        if SEVERAL:
            w = load_state(w_before, DIM, TRANSPOSED)
        store_state(w_end + state * DIM * DIM, w, DIM, TRANSPOSED)
    if ln_weight is not None:
        tl.store(dweight + program * DIM + j, tl.sum(dgain, axis=0))
        tl.store(dbias + program * DIM + j, tl.sum(doffset, axis=0))


segments = Tuned(segments_kernel)
