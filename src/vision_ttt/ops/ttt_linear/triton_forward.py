"""Forward kernel of ttt_linear for GPUs: one program scans the tokens of one head of one image."""

from __future__ import annotations

import triton
import triton.language as tl

from vision_ttt.ops.ttt_linear.triton_tiles import (
    by_rows,
    dot,
    load_tokens,
    load_transposed,
    project,
    row_offsets,
    standardise,
    store_tokens,
    store_transposed,
)
from vision_ttt.ops.ttt_linear.triton_tuning import PLAIN, tuned


# fmt: off
@triton.jit(do_not_specialize=PLAIN)
def forward_kernel(
    q, k, v, eta, w0, b0, ln_weight, ln_bias, scale,
    o, w_out, b_out, kept_w, kept_b,
    q_strides, k_strides, v_strides, state_batch, scale_head,
    length, heads, reverse_heads, mini_batch_size, interval, eps,
    DIM: tl.constexpr, TILE: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    program = tl.program_id(0).to(tl.int64)
    batch, head = program // heads, program % heads
    reverse = head >= heads - reverse_heads
    j = tl.arange(0, DIM)
    place = tl.arange(0, TILE)

    state = batch * state_batch + head
    w = load_transposed(w0 + state * DIM * DIM, DIM)
    b = tl.broadcast_to(tl.load(b0 + state * DIM + j)[:, None], [DIM, TILE])  # equal columns
    ones = tl.full([TILE, TILE], 1.0, OPERAND)
    if ln_weight is not None:
        gain = tl.load(ln_weight + head * DIM + j)[None, :]
        offset = tl.load(ln_bias + head * DIM + j)[None, :]
    # Without a norm the roundings of W and G add up along the sequence, see the README.
    SPLIT: tl.constexpr = ln_weight is None
    p = tl.full([TILE], 1.0, tl.float32)
    if scale is not None:
        scale += head * scale_head
        p = tl.load(scale + place, mask=place < mini_batch_size, other=0.0)
        p_full = tl.load(scale + mini_batch_size - 1)
        p_last = tl.load(scale + (length - 1) % mini_batch_size)

    q += batch * q_strides[0] + head * q_strides[2]
    k += batch * k_strides[0] + head * k_strides[2]
    v += batch * v_strides[0] + head * v_strides[2]
    eta += batch * length * heads + head
    o += (batch * length * heads + head) * DIM
    q_rows = row_offsets(q_strides[1], reverse, TILE)
    k_rows = row_offsets(k_strides[1], reverse, TILE)
    v_rows = row_offsets(v_strides[1], reverse, TILE)
    eta_rows = place * tl.where(reverse, -heads, heads)
    first = tl.where(reverse, length - 1, 0).to(tl.int64)
    step = tl.where(reverse, -1, 1).to(tl.int64) * mini_batch_size

    # A short mini-batch leaves too little to do while its tokens arrive: load them one ahead.
    # A long one has enough, and no registers to spare.
    AHEAD: tl.constexpr = TILE == 16
    present = place < tl.minimum(mini_batch_size, length)
    if AHEAD:
        q_next = load_tokens(q + first * q_strides[1], q_rows, present, DIM)
        k_next = load_tokens(k + first * k_strides[1], k_rows, present, DIM)
    if kept_w is not None:
        kept_w += program * DIM * DIM
        kept_b += program * DIM
    keep_at = interval * mini_batch_size
    for start in tl.range(0, length, mini_batch_size, num_stages=1):
        valid, here = present, first
        first += step
        present = place < tl.minimum(mini_batch_size, length - start - mini_batch_size)
        if AHEAD:
            q_t, k_t = q_next, k_next
            v_t = load_tokens(v + here * v_strides[1], v_rows, valid, DIM)
            eta_t = tl.load(eta + here * heads + eta_rows, mask=valid, other=0.0)
            q_next = load_tokens(q + first * q_strides[1], q_rows, present, DIM)
            k_next = load_tokens(k + first * k_strides[1], k_rows, present, DIM)
        else:
            q_t = load_tokens(q + here * q_strides[1], q_rows, valid, DIM)
            k_t = load_tokens(k + here * k_strides[1], k_rows, valid, DIM)
            v_t = load_tokens(v + here * v_strides[1], v_rows, valid, DIM)
            eta_t = tl.load(eta + here * heads + eta_rows, mask=valid, other=0.0)

        if kept_w is not None and start == keep_at:
            store_transposed(kept_w, w, DIM)
            tl.store(kept_b + j, tl.max(b, axis=1))
            kept_w += tl.num_programs(0).to(tl.int64) * DIM * DIM
            kept_b += tl.num_programs(0).to(tl.int64) * DIM
            keep_at += interval * mini_batch_size

        # P Aᵀ [s, t], with A = tril(Q Kᵀ + 1)
        nothing = tl.zeros([TILE, TILE], tl.float32)
        attention = dot(k_t, tl.trans(q_t), nothing, OPERAND, PRECISION) + 1.0
        attention = tl.where(place[:, None] <= place[None, :], p[None, :] * attention, 0.0)

        z_k = dot(w, tl.trans(k_t), b, OPERAND, PRECISION, SPLIT)  # [d, n]
        z_q = dot(w, tl.trans(q_t), b, OPERAND, PRECISION, SPLIT)
        z_k, k_row = by_rows(tl.trans(z_k), k_t)
        if ln_weight is not None:
            x_hat, r = standardise(z_k, valid, eps, DIM)
            error = x_hat * gain + offset + (k_row.to(tl.float32) - v_t.to(tl.float32))
            g, _ = project(error * gain, x_hat, DIM)
            g *= (-r * eta_t)[:, None]
        else:
            g = (v_t.to(tl.float32) - z_k) * eta_t[:, None]
        down = tl.trans(g if SPLIT else g.to(OPERAND))  # -Gᵀ [d, n]
        push = down  # -p_n Gᵀ
        if scale is not None:
            g *= p_last if start + mini_batch_size > length else p_full
            push = tl.trans(g if SPLIT else g.to(OPERAND))

        # Z_q = Q W + b - P A G
        z_q = dot(down, attention, z_q, OPERAND, PRECISION, SPLIT)
        z_q, q_row = by_rows(tl.trans(z_q), q_t)
        if ln_weight is not None:
            x_hat, _ = standardise(z_q, valid, eps, DIM)
            z_q = x_hat * gain + offset + q_row.to(tl.float32)
        o_rows = row_offsets(heads * DIM, reverse, TILE)
        store_tokens(o + here * heads * DIM, o_rows, valid, z_q, DIM)

        # W ← W - p_n Kᵀ G, b ← b - p_n Σ G
        b = dot(push, ones, b, OPERAND, PRECISION, SPLIT)
        w = dot(push, k_t, w, OPERAND, PRECISION, SPLIT)

    store_transposed(w_out + program * DIM * DIM, w, DIM)
    tl.store(b_out + program * DIM + j, tl.max(b, axis=1))


forward = tuned(forward_kernel)
crowded_forward = tuned(forward_kernel, crowded=True)
