"""Kernel of ttt_linear for a part of a mini-batch: up to a tile of tokens, the sums before them.

One program per head of one image holds the state and the sums in registers, and writes the state
that the last token sees and the new sums. This folder's README has the equations.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vision_ttt.ops.ttt_linear.triton_tiles import (
    by_rows,
    dot,
    load_affine,
    load_bias,
    load_state,
    load_tokens,
    product,
    project,
    standardise,
    store_bias,
    store_state,
    store_tokens,
)
from vision_ttt.ops.ttt_linear.triton_tuning import PLAIN


# fmt: off
@triton.jit(do_not_specialize=[*PLAIN, "tokens", "position"])
def part_kernel(
    q, k, v, eta, w, b, ln_weight, ln_bias, scale, positions, sum_w, sum_b,
    o, last_w, last_b, to_sum_w, to_sum_b, next_w, next_b,
    q_strides, k_strides, v_strides, state_batch, scale_head,
    length, heads, tokens, position, mini_batch_size, eps,
    DIM: tl.constexpr, TILE: tl.constexpr, OPERAND: tl.constexpr, PARTS: tl.constexpr,
):
    # fmt: on
    NORM: tl.constexpr = ln_weight is not None
    program = tl.program_id(0).to(tl.int64)
    batch, head = program // heads, program % heads
    place = tl.arange(0, TILE)
    valid = place < tokens
    row = tl.where(valid, place, 0).to(tl.int64)
    here = (batch * length + row) * heads + head  # in contiguous [B, T, H]
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

    start = batch * state_batch + head
    w_t = load_state(w + start * DIM * DIM, DIM, False)
    b_t = load_bias(b + start * DIM, DIM, TILE, False)
    s_w = tl.zeros([DIM, DIM], tl.float32)
    s_b = tl.zeros([TILE, DIM], tl.float32)
    if sum_w is not None:
        s_w = tl.where(begun, load_state(sum_w + program * DIM * DIM, DIM, False), s_w)
        s_b = tl.where(begun, load_bias(sum_b + program * DIM, DIM, TILE, False), s_b)

    z = product(k_t, w_t, b_t, OPERAND, PARTS, False, not NORM)
    z, k_row = by_rows(z, k_t)
    if NORM:
        x_hat, r = standardise(z, valid, eps, DIM)
        error = x_hat * gain + offset + (k_row.to(tl.float32) - v_t.to(tl.float32))
        step, _ = project(error * gain, x_hat, DIM)
        step *= (r * eta_t)[:, None]
    else:
        step = (z - v_t.to(tl.float32)) * eta_t[:, None]

    # Z_q = Q W + b - P (A G + Q S + s)
    attention = tl.zeros([TILE, TILE], tl.float32)
    attention = dot(q_t, tl.trans(k_t), attention, OPERAND, PARTS) + 1.0
    attention = tl.where(place[:, None] >= place[None, :], attention, 0.0)
    moved = product(q_t, s_w, s_b, OPERAND, PARTS, False, not NORM)
    moved = product(attention, step, moved, OPERAND, PARTS, False, not NORM)
    z = product(q_t, w_t, b_t, OPERAND, PARTS, False, not NORM) - p[:, None] * moved
    z, q_row = by_rows(z, q_t)
    if NORM:
        x_hat, _ = standardise(z, valid, eps, DIM)
        z = x_hat * gain + offset + q_row.to(tl.float32)
    store_tokens(o, here * DIM, valid, z, DIM)

    # S ← S + Kᵀ G, s ← s + Σ G
    if last_w is not None or to_sum_w is not None:
        s_w = product(tl.trans(k_t), step, s_w, OPERAND, PARTS, False, not NORM)
        s_b += tl.sum(step, axis=0)[None, :]
    if last_w is not None:
        store_state(last_w + program * DIM * DIM, w_t - p_n * s_w, DIM, False)
        store_bias(last_b + program * DIM, b_t - p_n * s_b, DIM, False)
    if next_w is not None:
        store_state(next_w + program * DIM * DIM, tl.where(full, w_t - p_n * s_w, w_t), DIM, False)
        store_bias(next_b + program * DIM, tl.where(full, b_t - p_n * s_b, b_t), DIM, False)
    if to_sum_w is not None:
        store_state(to_sum_w + program * DIM * DIM, tl.where(full, 0.0, s_w), DIM, False)
        store_bias(to_sum_b + program * DIM, tl.where(full, 0.0, s_b), DIM, False)
