"""Forward kernel of ttt_linear for GPUs: one program scans the tokens of one head of one image."""

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
    store_bias,
    store_state,
    store_tokens,
    tiles_of,
    turned,
)
from vision_ttt.ops.ttt_linear.triton_tuning import PLAIN, Tuned


# fmt: off
@triton.jit(do_not_specialize=PLAIN)
def forward_kernel(
    q, k, v, eta, w0, b0, ln_weight, ln_bias, scale,
    o, w_out, b_out, kept_w, kept_b,
    q_strides, k_strides, v_strides, state_batch, scale_head,
    length, heads, reverse_heads, mini_batch_size, interval, eps,
    DIM: tl.constexpr, TILE: tl.constexpr, SEVERAL: tl.constexpr,
    OPERAND: tl.constexpr, PARTS: tl.constexpr, TRANSPOSED: tl.constexpr,
):
    # fmt: on
    program = tl.program_id(0).to(tl.int64)
    batch, head = program // heads, program % heads
    reverse = head >= heads - reverse_heads
    j = tl.arange(0, DIM)
    place = tl.arange(0, TILE)

    state = batch * state_batch + head
    w = load_state(w0 + state * DIM * DIM, DIM, TRANSPOSED)
    b = load_bias(b0 + state * DIM, DIM, TILE, TRANSPOSED)
    w_out += program * DIM * DIM
    # With several tiles per mini-batch, b and the W in memory are the state before the mini-batch.
    # The tiles update w and b_now: the state, or with a position scale only its change.
    PART_SCALED: tl.constexpr = SEVERAL and scale is not None
    b_now = b
    if SEVERAL:
        store_state(w_out, w, DIM, TRANSPOSED)
        tl.debug_barrier()
    if PART_SCALED:
        w, b_now = tl.zeros_like(w), tl.zeros_like(b)
    # A cast, because Triton 3.8 interprets no constants in bfloat16.
    ones = tl.full([TILE, TILE], 1.0, tl.float32).to(OPERAND)
    if ln_weight is not None:
        gain = tl.load(ln_weight + head * DIM + j)[None, :]
        offset = tl.load(ln_bias + head * DIM + j)[None, :]
    # Without a norm the rounding errors of W and G accumulate along the sequence, see the README.
    SPLIT: tl.constexpr = ln_weight is None
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

    # A tile's arithmetic is too short to hide its loads: load one tile ahead where registers allow.
    AHEAD: tl.constexpr = tl.bfloat16 == OPERAND and not SEVERAL
    if AHEAD:
        part, token, valid, last = locate(0, mini_batch_size, length, reverse, TILE, SEVERAL)
        q_next = load_tokens(q, token * q_strides[1], valid, DIM)
        k_next = load_tokens(k, token * k_strides[1], valid, DIM)
    if kept_w is not None:
        kept_w += program * DIM * DIM
        kept_b += program * DIM
    tiles = tiles_of(length, mini_batch_size, TILE)
    segment = interval * tl.cdiv(mini_batch_size, TILE)
    keep_at = segment
    for number in tl.range(0, tiles, num_stages=1):
        part, token, valid, last = locate(number, mini_batch_size, length, reverse, TILE, SEVERAL)
        if AHEAD:
            q_t, k_t = q_next, k_next
            _, later, there, _ = locate(number + 1, mini_batch_size, length, reverse, TILE, SEVERAL)
            q_next = load_tokens(q, later * q_strides[1], there, DIM)
            k_next = load_tokens(k, later * k_strides[1], there, DIM)
        else:
            q_t = load_tokens(q, token * q_strides[1], valid, DIM)
            k_t = load_tokens(k, token * k_strides[1], valid, DIM)
        v_t = load_tokens(v, token * v_strides[1], valid, DIM)
        eta_t = tl.load(eta + token * heads, mask=valid, other=0.0)
        w_held = load_state(w_out, DIM, TRANSPOSED) if SEVERAL else w

        if kept_w is not None and number == keep_at:
            store_state(kept_w, w_held, DIM, TRANSPOSED)
            store_bias(kept_b, b, DIM, TRANSPOSED)
            kept_w += tl.num_programs(0).to(tl.int64) * DIM * DIM
            kept_b += tl.num_programs(0).to(tl.int64) * DIM
            keep_at += segment

        nothing = tl.zeros([TILE, TILE], tl.float32)
        attention = dot(k_t, tl.trans(q_t), nothing, OPERAND, PARTS) + 1.0
        if PART_SCALED:
            p = tl.load(scale + part + place, mask=valid, other=0.0)
        if scale is not None:
            attention *= p[None, :]
        attention = tl.where(place[:, None] <= place[None, :], attention, 0.0)  # P Aᵀ [s, t]

        w_t = turned(w_held, TRANSPOSED)
        z_k = product(k_t, w_t, b, OPERAND, PARTS, TRANSPOSED, SPLIT)
        if SEVERAL:
            z_q = product(q_t, w, b_now, OPERAND, PARTS, TRANSPOSED, SPLIT)
            if PART_SCALED:
                z_q = product(q_t, w_t, b + p[:, None] * z_q, OPERAND, PARTS, TRANSPOSED, SPLIT)
        else:
            z_q = product(q_t, w_t, b, OPERAND, PARTS, TRANSPOSED, SPLIT)
        z_k, k_row = by_rows(turned(z_k, TRANSPOSED), k_t)
        if ln_weight is not None:
            x_hat, r = standardise(z_k, valid, eps, DIM)
            error = x_hat * gain + offset + (k_row.to(tl.float32) - v_t.to(tl.float32))
            g, _ = project(error * gain, x_hat, DIM)
            g *= (-r * eta_t)[:, None]
        else:
            g = (v_t.to(tl.float32) - z_k) * eta_t[:, None]
        down = g if SPLIT else g.to(OPERAND)  # -G
        push = down  # -p_n G
        if scale is not None and not SEVERAL:
            g *= p_last if (number + 1) * mini_batch_size > length else p_full
            push = g if SPLIT else g.to(OPERAND)

        # Z_q = Q W + b - P A G
        z_q = product(tl.trans(attention), down, z_q, OPERAND, PARTS, TRANSPOSED, SPLIT)
        z_q, q_row = by_rows(turned(z_q, TRANSPOSED), q_t)
        if ln_weight is not None:
            x_hat, _ = standardise(z_q, valid, eps, DIM)
            z_q = x_hat * gain + offset + q_row.to(tl.float32)
        store_tokens(o, token * heads * DIM, valid, z_q, DIM)

        # W ← W - p_n Kᵀ G, b ← b - p_n Σ G
        w = product(tl.trans(k_t), push, w, OPERAND, PARTS, TRANSPOSED, SPLIT)
        if SEVERAL:
            b_now = product(ones, push, b_now, OPERAND, PARTS, TRANSPOSED, SPLIT)
            if last:
                p_n = 1.0
                if PART_SCALED:
                    p_n = p_last if number + 1 == tiles else p_full
                w, b, b_now = end_mini_batch(w_out, w, b, b_now, p_n, DIM, PART_SCALED)
        else:
            b = product(ones, push, b, OPERAND, PARTS, TRANSPOSED, SPLIT)

    if not SEVERAL:
        store_state(w_out, w, DIM, TRANSPOSED)
    store_bias(b_out + program * DIM, b, DIM, TRANSPOSED)


forward = Tuned(forward_kernel)
