"""Kernel of ttt_mlp for a part of a mini-batch: up to a tile of tokens, the sums before them.

One program per head of one image goes through the state block by block, as the forward kernel does,
and writes the state that the last token sees and the new sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vision_ttt.ops.ttt_linear.triton_tiles import load_affine, load_tokens, product, store_tokens
from vision_ttt.ops.ttt_linear.triton_tuning import PLAIN
from vision_ttt.ops.ttt_mlp.triton_blocks import gelu, gelu_slope, in_w1, in_w2, rows_of
from vision_ttt.ops.ttt_mlp.triton_forward import causal_attention, errors, outputs, through_block


# fmt: off
@triton.jit(do_not_specialize=[*PLAIN, "tokens", "position"])
def part_kernel(
    q, k, v, eta, w1, b1, w2, b2, ln_weight, ln_bias, scale, positions,
    sum_w1, sum_b1, sum_w2, sum_b2, o, last_w1, last_b1, last_w2, last_b2,
    to_sum_w1, to_sum_b1, to_sum_w2, to_sum_b2, next_w1, next_b1, next_w2, next_b2,
    q_strides, k_strides, v_strides, state_batch, scale_head,
    length, heads, tokens, position, mini_batch_size, eps,
    DIM: tl.constexpr, TILE: tl.constexpr, OPERAND: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # fmt: on
    HIDDEN: tl.constexpr = 4 * DIM
    NORM: tl.constexpr = ln_weight is not None
    program = tl.program_id(0).to(tl.int64)
    batch, head = program // heads, program % heads
    i = tl.arange(0, DIM)
    place = tl.arange(0, TILE)
    valid = place < tokens
    row = tl.where(valid, place, 0).to(tl.int64)
    here = (batch * length + row) * heads + head  # in contiguous [B, T, H]

    start = batch * state_batch + head
    w1 += start * DIM * HIDDEN
    b1 += start * HIDDEN
    w2 += start * HIDDEN * DIM
    b2 += start * DIM
    of_state = program * DIM * HIDDEN
    of_bias = program * HIDDEN
    if positions is not None:
        position = tl.load(positions + batch).to(tl.int32)
    begun = position > 0  # else the sums are not read
    full = position + tokens == mini_batch_size
    p = tl.where(valid, 1.0, 0.0)
    p_n = 1.0
    if scale is not None:
        scale += head * scale_head
        there = valid & (position >= 0) & (position + place < mini_batch_size)
        p = tl.load(scale + position + place, mask=there, other=0.0)
        p_n = tl.sum(tl.where(place == tokens - 1, p, 0.0), axis=0)
    if NORM:
        ln_weight += head * DIM
        ln_bias += head * DIM
    gain, offset = load_affine(ln_weight, ln_bias, NORM, DIM)
    q += batch * q_strides[0] + head * q_strides[2]
    k += batch * k_strides[0] + head * k_strides[2]
    v += batch * v_strides[0] + head * v_strides[2]
    q_t = load_tokens(q, row * q_strides[1], valid, DIM)
    k_t = load_tokens(k, row * k_strides[1], valid, DIM)
    v_t = load_tokens(v, row * v_strides[1], valid, DIM)
    eta_t = tl.load(eta + here, mask=valid, other=0.0)

    b2_t = tl.load(b2 + i)
    _, _, _, step2 = errors(
        w1, b1, w2, b2_t, k_t, v_t, eta_t, valid, gain, offset, eps, None, here,
        DIM, TILE, OPERAND, PARTS, BLOCK, NORM,
    )  # fmt: skip
    attention = causal_attention(q_t, k_t, p, TILE, OPERAND, PARTS)
    attention2 = tl.zeros([TILE, TILE], tl.float32)
    z2_q = rows_of(b2_t, TILE)
    sb2 = tl.zeros([DIM], tl.float32)
    if sum_w1 is not None:
        sb2 = tl.load(sum_b2 + program * DIM + i, mask=begun, other=0.0)
    moved = rows_of(sb2, TILE)
    for block in tl.range(0, HIDDEN // BLOCK, num_stages=1):
        of_w1 = in_w1(block, DIM, BLOCK)
        of_b1 = block * BLOCK + tl.arange(0, BLOCK)
        of_w2 = in_w2(block, DIM, BLOCK)
        w1_t = tl.load(w1 + of_w1)
        b1_t = tl.load(b1 + of_b1)
        w2_t = tl.load(w2 + of_w2)
        z1 = product(k_t, w1_t, rows_of(b1_t, TILE), OPERAND, PARTS, False, not NORM)
        x2 = gelu(z1)
        step1 = tl.zeros_like(z1)
        step1 = product(step2, tl.trans(w2_t), step1, OPERAND, PARTS, False, not NORM)
        step1 *= gelu_slope(z1)
        s1 = tl.zeros([DIM, BLOCK], tl.float32)
        sb1 = tl.zeros([BLOCK], tl.float32)
        s2 = tl.zeros([BLOCK, DIM], tl.float32)
        if sum_w1 is not None:
            s1 = tl.load(sum_w1 + of_state + of_w1, mask=begun, other=0.0)
            sb1 = tl.load(sum_b1 + of_bias + of_b1, mask=begun, other=0.0)
            s2 = tl.load(sum_w2 + of_state + of_w2, mask=begun, other=0.0)
        z2_q, moved, attention2 = through_block(
            q_t, w1_t, b1_t, w2_t, x2, step1, attention, p, s1, sb1, s2,
            z2_q, moved, attention2, TILE, True, OPERAND, PARTS, not NORM,
        )  # fmt: skip
        if last_w1 is not None or to_sum_w1 is not None:
            s1 = product(tl.trans(k_t), step1, s1, OPERAND, PARTS, False, not NORM)
            s2 = product(tl.trans(x2), step2, s2, OPERAND, PARTS, False, not NORM)
            sb1 += tl.sum(step1, axis=0)
        if last_w1 is not None:
            tl.store(last_w1 + of_state + of_w1, w1_t - p_n * s1)
            tl.store(last_b1 + of_bias + of_b1, b1_t - p_n * sb1)
            tl.store(last_w2 + of_state + of_w2, w2_t - p_n * s2)
        if next_w1 is not None:
            tl.store(next_w1 + of_state + of_w1, tl.where(full, w1_t - p_n * s1, w1_t))
            tl.store(next_b1 + of_bias + of_b1, tl.where(full, b1_t - p_n * sb1, b1_t))
            tl.store(next_w2 + of_state + of_w2, tl.where(full, w2_t - p_n * s2, w2_t))
        if to_sum_w1 is not None:
            tl.store(to_sum_w1 + of_state + of_w1, tl.where(full, 0.0, s1))
            tl.store(to_sum_b1 + of_bias + of_b1, tl.where(full, 0.0, sb1))
            tl.store(to_sum_w2 + of_state + of_w2, tl.where(full, 0.0, s2))
    o_t = outputs(
        z2_q, moved, attention2, step2, q_t, p, valid, gain, offset, eps,
        DIM, TILE, True, OPERAND, PARTS, NORM,
    )  # fmt: skip
    store_tokens(o, here * DIM, valid, o_t, DIM)
    sb2 += tl.sum(step2, axis=0)
    of_b2 = program * DIM + i
    if last_w1 is not None:
        tl.store(last_b2 + of_b2, b2_t - p_n * sb2)
    if next_w1 is not None:
        tl.store(next_b2 + of_b2, tl.where(full, b2_t - p_n * sb2, b2_t))
    if to_sum_w1 is not None:
        tl.store(to_sum_b2 + of_b2, tl.where(full, 0.0, sb2))
