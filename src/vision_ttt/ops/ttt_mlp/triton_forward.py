"""Forward kernel of ttt_mlp for GPUs: one program scans the tokens of one head of one image.

The state is in memory, and a program goes through it block by block, twice per tile of tokens:
first to the error of the training views, then back through the layers, to the test views and to the
new state. The backward pass runs the same kernel on every segment between two saved states, without
test views, for what its second kernel needs. This folder's README has the derivation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vision_ttt.ops.ttt_linear.triton_tiles import (
    by_rows,
    dot,
    load_affine,
    load_tokens,
    locate,
    product,
    project,
    standardise,
    store_tokens,
    tiles_of,
)
from vision_ttt.ops.ttt_linear.triton_tuning import PLAIN
from vision_ttt.ops.ttt_mlp.triton_blocks import (
    copy_state,
    gelu,
    gelu_slope,
    in_hidden,
    in_w1,
    in_w2,
    rows_of,
)


# fmt: off
@triton.jit
def errors(
    w1, b1, w2, b2_t, k_t, v_t, eta_t, valid, gain, offset, eps, z1_out, here,
    DIM: tl.constexpr, TILE: tl.constexpr, OPERAND: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr, NORM: tl.constexpr,
):
    # fmt: on
    """Of the training views' Z2 = σ(K W1 + b1) W2 + b2: x̂ (Z2 without norm), r, mean(u x̂) and G2.

    Z1 is written to ``z1_out``, unless that is None.
    """
    z2 = rows_of(b2_t, TILE)
    for block in tl.range(0, 4 * DIM // BLOCK, num_stages=1):
        z1 = rows_of(tl.load(b1 + block * BLOCK + tl.arange(0, BLOCK)), TILE)
        w1_t = tl.load(w1 + in_w1(block, DIM, BLOCK))
        z1 = product(k_t, w1_t, z1, OPERAND, PARTS, False, not NORM)
        if z1_out is not None:
            to = z1_out + in_hidden(here, block, DIM, BLOCK)
            tl.store(to, z1.to(z1_out.dtype.element_ty), mask=valid[:, None])
        w2_t = tl.load(w2 + in_w2(block, DIM, BLOCK))
        z2 = product(gelu(z1), w2_t, z2, OPERAND, PARTS, False, not NORM)
    x, k_row = by_rows(z2, k_t)
    r = 0.0
    mean_ux = 0.0
    if NORM:
        x, r = standardise(x, valid, eps, DIM)
        error = x * gain + offset + (k_row.to(tl.float32) - v_t.to(tl.float32))
        step2, mean_ux = project(error * gain, x, DIM)
        step2 *= (r * eta_t)[:, None]
    else:
        step2 = (x - v_t.to(tl.float32)) * eta_t[:, None]
    return x, r, mean_ux, step2


# fmt: off
@triton.jit
def through_block(
    q_t, w1_t, b1_t, w2_t, x2, step1, attention, p, s1, sb1, s2, z2_q, moved, attention2,
    TILE: tl.constexpr, SEVERAL: tl.constexpr, OPERAND: tl.constexpr, PARTS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    # fmt: on
    """Add a block's shares of the test views to X2_q W2 + b2, X2_q S2 + s2 and X2_q X2ᵀ.

    Z1_q = Q W1 + b1 - P (A1 G1 + Q S1 + s1), and ``attention`` is -P A1.
    """
    z1_q = product(q_t, w1_t, rows_of(b1_t, TILE), OPERAND, PARTS, False, SPLIT)
    z1_q = product(attention, step1, z1_q, OPERAND, PARTS, False, SPLIT)
    if SEVERAL:
        moved1 = product(q_t, s1, rows_of(sb1, TILE), OPERAND, PARTS, False, SPLIT)
        z1_q -= p[:, None] * moved1
    x2_q = gelu(z1_q)
    attention2 = dot(x2_q, tl.trans(x2), attention2, OPERAND, PARTS)
    z2_q = product(x2_q, w2_t, z2_q, OPERAND, PARTS, False, SPLIT)
    if SEVERAL:
        moved = product(x2_q, s2, moved, OPERAND, PARTS, False, SPLIT)
    return z2_q, moved, attention2


# fmt: off
@triton.jit
def outputs(
    z2_q, moved, attention2, step2, q_t, p, valid, gain, offset, eps,
    DIM: tl.constexpr, TILE: tl.constexpr, SEVERAL: tl.constexpr, OPERAND: tl.constexpr,
    PARTS: tl.constexpr, NORM: tl.constexpr,
):
    # fmt: on
    """f(Q) at Z2_q = X2_q W2 + b2 - P (A2 G2 + X2_q S2 + s2), of what the blocks have added up."""
    place = tl.arange(0, TILE)
    causal = place[:, None] >= place[None, :]  # [t, s]
    attention2 = tl.where(causal, (attention2 + 1.0) * -p[:, None], 0.0)
    z2_q = product(attention2, step2, z2_q, OPERAND, PARTS, False, not NORM)
    if SEVERAL:
        z2_q -= p[:, None] * moved
    z2_q, q_row = by_rows(z2_q, q_t)
    if NORM:
        x_q, _ = standardise(z2_q, valid, eps, DIM)
        z2_q = x_q * gain + offset + q_row.to(tl.float32)
    return z2_q


@triton.jit
def causal_attention(
    q_t, k_t, p, TILE: tl.constexpr, OPERAND: tl.constexpr, PARTS: tl.constexpr
):
    """-P A1, with A1 [t, s] the lower triangle of Q Kᵀ + 1."""
    place = tl.arange(0, TILE)
    attention = tl.zeros([TILE, TILE], tl.float32)
    attention = dot(q_t, tl.trans(k_t), attention, OPERAND, PARTS) + 1.0
    return tl.where(place[:, None] >= place[None, :], attention * -p[:, None], 0.0)


# fmt: off
@triton.jit(do_not_specialize=[*PLAIN, "states"])
def forward_kernel(
    q, k, v, eta, start_w1, start_b1, start_w2, start_b2, ln_weight, ln_bias, scale,
    o, w1, b1, w2, b2, kept_w1, kept_b1, kept_w2, kept_b2, sum_w1, sum_b1, sum_w2,
    z1_out, x_out, norm_out,
    q_strides, k_strides, v_strides, state_batch, scale_head,
    length, heads, reverse_heads, mini_batch_size, interval, states, eps,
    DIM: tl.constexpr, TILE: tl.constexpr, SEVERAL: tl.constexpr,
    OPERAND: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    HIDDEN: tl.constexpr = 4 * DIM
    BLOCKS: tl.constexpr = HIDDEN // BLOCK
    REPLAY: tl.constexpr = q is None
    NORM: tl.constexpr = ln_weight is not None
    # Without a norm the rounding errors of W and G accumulate along the sequence, as in ttt_linear.
    SPLIT: tl.constexpr = not NORM
    # Factors of float32 need many registers: those of all blocks are then loaded for every block.
    LATE: tl.constexpr = tl.float32 == OPERAND
    program = tl.program_id(0).to(tl.int64)
    segment, state = program // states, program % states
    batch, head = state // heads, state % heads
    reverse = head >= heads - reverse_heads
    i = tl.arange(0, DIM)
    place = tl.arange(0, TILE)

    w1 += program * DIM * HIDDEN
    b1 += program * HIDDEN
    w2 += program * HIDDEN * DIM
    b2 += program * DIM
    tiles_of_one = tl.cdiv(mini_batch_size, TILE)
    tiles = tiles_of(length, mini_batch_size, TILE)
    begin = 0
    end = tiles
    from_w1 = start_w1 + (batch * state_batch + head) * DIM * HIDDEN
    from_b1 = start_b1 + (batch * state_batch + head) * HIDDEN
    from_w2 = start_w2 + (batch * state_batch + head) * HIDDEN * DIM
    from_b2 = start_b2 + (batch * state_batch + head) * DIM
    if REPLAY:
        begin = segment.to(tl.int32) * interval * tiles_of_one
        end = tl.minimum(begin + interval * tiles_of_one, tiles)
        if segment > 0:
            kept = (segment - 1) * states + state
            from_w1 = kept_w1 + kept * DIM * HIDDEN
            from_b1 = kept_b1 + kept * HIDDEN
            from_w2 = kept_w2 + kept * HIDDEN * DIM
            from_b2 = kept_b2 + kept * DIM
    copy_state(w1, b1, w2, b2, from_w1, from_b1, from_w2, from_b2, DIM, BLOCK)
    tl.debug_barrier()
    b2_now = tl.load(b2 + i)
    # With several tiles per mini-batch, the state in memory is the one before it, and its tokens'
    # sums so far are in memory, too.
    sum_b2 = tl.zeros([DIM], tl.float32)
    if SEVERAL:
        sum_w1 += program * DIM * HIDDEN
        sum_b1 += program * HIDDEN
        sum_w2 += program * HIDDEN * DIM
    if NORM:
        ln_weight += head * DIM
        ln_bias += head * DIM
    gain, offset = load_affine(ln_weight, ln_bias, NORM, DIM)
    p_full = 1.0
    p_last = 1.0
    if scale is not None:
        scale += head * scale_head
        p_full = tl.load(scale + mini_batch_size - 1)
        p_last = tl.load(scale + (length - 1) % mini_batch_size)
    if not REPLAY:
        q += batch * q_strides[0] + head * q_strides[2]
    k += batch * k_strides[0] + head * k_strides[2]
    v += batch * v_strides[0] + head * v_strides[2]

    segment_tiles = interval * tiles_of_one
    keep_at = segment_tiles
    saved = state
    for number in tl.range(begin, end, num_stages=1):
        part, token, valid, last = locate(number, mini_batch_size, length, reverse, TILE, SEVERAL)
        here = (batch * length + token) * heads + head  # in contiguous [B, T, H]
        k_t = load_tokens(k, token * k_strides[1], valid, DIM)
        v_t = load_tokens(v, token * v_strides[1], valid, DIM)
        eta_t = tl.load(eta + here, mask=valid, other=0.0)
        tl.debug_barrier()  # the state that the former tile has written
        if not REPLAY and kept_w1 is not None and number == keep_at:
            tl.store(b2 + i, b2_now)
            tl.debug_barrier()
            copy_state(
                kept_w1 + saved * DIM * HIDDEN, kept_b1 + saved * HIDDEN,
                kept_w2 + saved * HIDDEN * DIM, kept_b2 + saved * DIM,
                w1, b1, w2, b2, DIM, BLOCK,
            )  # fmt: skip
            saved += states
            keep_at += segment_tiles

        x, r, mean_ux, step2 = errors(
            w1, b1, w2, b2_now, k_t, v_t, eta_t, valid, gain, offset, eps, z1_out, here,
            DIM, TILE, OPERAND, PARTS, BLOCK, NORM,
        )  # fmt: skip
        if REPLAY and NORM:
            tl.store(norm_out + here * 2, r, mask=valid)
            tl.store(norm_out + here * 2 + 1, mean_ux, mask=valid)
        if REPLAY:
            store_tokens(x_out, here * DIM, valid, x, DIM)

        p_n = p_last if number + 1 == tiles else p_full  # of the last tile of a mini-batch
        if not REPLAY:
            p = tl.where(valid, 1.0, 0.0)
            if scale is not None:
                p = tl.load(scale + part + place, mask=valid, other=0.0)
            q_t = load_tokens(q, token * q_strides[1], valid, DIM)
            attention = causal_attention(q_t, k_t, p, TILE, OPERAND, PARTS)
            attention2 = tl.zeros([TILE, TILE], tl.float32)
            z2_q = rows_of(b2_now, TILE)
            moved = rows_of(sum_b2, TILE)
        for block in tl.range(0, BLOCKS, num_stages=1):
            of_w1 = in_w1(block, DIM, BLOCK)
            of_b1 = block * BLOCK + tl.arange(0, BLOCK)
            of_w2 = in_w2(block, DIM, BLOCK)
            w1_t = tl.load(w1 + of_w1)
            b1_t = tl.load(b1 + of_b1)
            w2_t = tl.load(w2 + of_w2)
            if LATE:
                k_t = load_tokens(k, token * k_strides[1], valid, DIM)
                if not REPLAY:
                    q_t = load_tokens(q, token * q_strides[1], valid, DIM)
            z1 = rows_of(b1_t, TILE)
            z1 = product(k_t, w1_t, z1, OPERAND, PARTS, False, SPLIT)
            x2 = gelu(z1)
            step1 = tl.zeros_like(z1)
            step1 = product(step2, tl.trans(w2_t), step1, OPERAND, PARTS, False, SPLIT)
            step1 *= gelu_slope(z1)
            s1 = None
            sb1 = None
            s2 = None
            if SEVERAL:
                # The first tile of a mini-batch finds no sums.
                s1 = tl.load(sum_w1 + of_w1, mask=part > 0, other=0.0)
                sb1 = tl.load(sum_b1 + of_b1, mask=part > 0, other=0.0)
                s2 = tl.load(sum_w2 + of_w2, mask=part > 0, other=0.0)
            if not REPLAY:
                z2_q, moved, attention2 = through_block(
                    q_t, w1_t, b1_t, w2_t, x2, step1, attention, p, s1, sb1, s2,
                    z2_q, moved, attention2, TILE, SEVERAL, OPERAND, PARTS, SPLIT,
                )  # fmt: skip
            # W1 ← W1 - p_n Kᵀ G1, in the same way b1, W2 and b2
            if SEVERAL:
                s1 = product(tl.trans(k_t), step1, s1, OPERAND, PARTS, False, SPLIT)
                s2 = product(tl.trans(x2), step2, s2, OPERAND, PARTS, False, SPLIT)
                sb1 += tl.sum(step1, axis=0)
                if last:
                    tl.store(w1 + of_w1, w1_t - p_n * s1)
                    tl.store(b1 + of_b1, b1_t - p_n * sb1)
                    tl.store(w2 + of_w2, w2_t - p_n * s2)
                else:
                    tl.store(sum_w1 + of_w1, s1)
                    tl.store(sum_b1 + of_b1, sb1)
                    tl.store(sum_w2 + of_w2, s2)
            else:
                w1_t = product(tl.trans(k_t), -p_n * step1, w1_t, OPERAND, PARTS, False, SPLIT)
                w2_t = product(tl.trans(x2), -p_n * step2, w2_t, OPERAND, PARTS, False, SPLIT)
                tl.store(w1 + of_w1, w1_t)
                tl.store(b1 + of_b1, b1_t - p_n * tl.sum(step1, axis=0))
                tl.store(w2 + of_w2, w2_t)
        if not REPLAY:
            o_t = outputs(
                z2_q, moved, attention2, step2, q_t, p, valid, gain, offset, eps,
                DIM, TILE, SEVERAL, OPERAND, PARTS, NORM,
            )  # fmt: skip
            store_tokens(o, here * DIM, valid, o_t, DIM)
        sum_b2 += tl.sum(step2, axis=0)
        if last:
            b2_now -= p_n * sum_b2
            sum_b2 = tl.zeros([DIM], tl.float32)
    tl.store(b2 + i, b2_now)
