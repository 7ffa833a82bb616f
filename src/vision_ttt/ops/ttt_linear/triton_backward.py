"""Backward kernels of ttt_linear for GPUs; the derivation is in this folder's README.

What depends on the states alone is computed by :func:`segments_kernel`, one program for every kept
state, side by side along the sequence. Only the gradient of the state has to travel from the last
mini-batch to the first: :func:`scan_kernel`, one program per head of one image. They hand over, per
token, x̂ (z without norm), ∂Z_q, and the attention's shares of ∂K and ∂G.
"""

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
@triton.jit(do_not_specialize=[*PLAIN, "states"])
def segments_kernel(
    q, k, v, eta, w0, b0, ln_weight, ln_bias, scale, grad_o, kept_w, kept_b,
    dq, dk_share, dg_share, dz_q_out, x_out, norm_out, w_end, dweight, dscale,
    q_strides, k_strides, v_strides, grad_strides, state_batch, scale_head,
    length, heads, reverse_heads, mini_batch_size, interval, states, eps,
    DIM: tl.constexpr, TILE: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
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
    w = load_transposed(start_w, DIM)
    b = tl.broadcast_to(tl.load(start_b + j)[:, None], [DIM, TILE])  # equal columns
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
    # One row per token of a tile, added up at the end: a sum over tokens needs all the warps.
    dgain = tl.zeros([TILE, DIM], tl.float32)
    dp = tl.zeros([TILE], tl.float32)

    q += batch * q_strides[0] + head * q_strides[2]
    k += batch * k_strides[0] + head * k_strides[2]
    v += batch * v_strides[0] + head * v_strides[2]
    grad_o += batch * grad_strides[0] + head * grad_strides[2]
    q_rows = row_offsets(q_strides[1], reverse, TILE)
    k_rows = row_offsets(k_strides[1], reverse, TILE)
    v_rows = row_offsets(v_strides[1], reverse, TILE)
    grad_rows = row_offsets(grad_strides[1], reverse, TILE)
    rows = row_offsets(heads * DIM, reverse, TILE)  # of contiguous [B, T, H, d]
    token = place * tl.where(reverse, -heads, heads)  # of contiguous [B, T, H]

    begin = segment * interval * mini_batch_size
    end = tl.minimum(begin + interval * mini_batch_size, length)
    for start in tl.range(begin, end, mini_batch_size, num_stages=1):
        valid = place < tl.minimum(mini_batch_size, length - start)
        first = tl.where(reverse, length - 1 - start, start).to(tl.int64)
        here = (batch * length + first) * heads + head
        q_t = load_tokens(q + first * q_strides[1], q_rows, valid, DIM)
        k_t = load_tokens(k + first * k_strides[1], k_rows, valid, DIM)
        v_t = load_tokens(v + first * v_strides[1], v_rows, valid, DIM)
        do_t = load_tokens(grad_o + first * grad_strides[1], grad_rows, valid, DIM).to(tl.float32)
        eta_t = tl.load(eta + here + token, mask=valid, other=0.0)
        # Asks for all tiles at once: else each goes to shared memory before the next is asked for.
        q_t, k_t = by_rows(q_t, k_t)

        # The forward pass, again.
        square = tl.zeros([TILE, TILE], tl.float32)
        wide = tl.zeros([DIM, TILE], tl.float32)
        causal = place[:, None] <= place[None, :]
        attention = dot(k_t, tl.trans(q_t), square, OPERAND, PRECISION) + 1.0
        attention = tl.where(causal, attention, 0.0)  # Aᵀ [s, t]
        scaled = p[None, :] * attention
        x = dot(w, tl.trans(k_t), b, OPERAND, PRECISION, SPLIT)  # [d, n]
        z_q = dot(w, tl.trans(q_t), b, OPERAND, PRECISION, SPLIT)
        x, k_row = by_rows(tl.trans(x), k_t)
        if ln_weight is not None:
            x, r = standardise(x, valid, eps, DIM)
            error = x * gain + offset + (k_row.to(tl.float32) - v_t.to(tl.float32))
            g, mean_ux = project(error * gain, x, DIM)
            g *= (-r * eta_t)[:, None]
            tl.store(norm_out + (here + token) * 2, r, mask=valid)
            tl.store(norm_out + (here + token) * 2 + 1, mean_ux, mask=valid)
        else:
            g = (v_t.to(tl.float32) - x) * eta_t[:, None]
        store_tokens(x_out + here * DIM, rows, valid, x, DIM)
        down = g if SPLIT else g.to(OPERAND)  # -G
        push = down  # -p_n G
        if scale is not None:
            g *= p_last if start + mini_batch_size > length else p_full
            push = g if SPLIT else g.to(OPERAND)

        # o = f(q), Z_q = Q W + b - P A G
        z_q = dot(tl.trans(down), scaled, z_q, OPERAND, PRECISION, SPLIT)
        z_q, _ = by_rows(tl.trans(z_q), q_t)
        dz_q = do_t
        if ln_weight is not None:
            x_q, r = standardise(z_q, valid, eps, DIM)
            dz_q, _ = project(do_t * gain, x_q, DIM)
            dz_q *= r[:, None]
            dgain += do_t * x_q
        store_tokens(dz_q_out + here * DIM, rows, valid, dz_q, DIM)
        dz_q = dz_q.to(OPERAND)
        dg_t = dot(tl.trans(dz_q), tl.trans(scaled), wide, OPERAND, PRECISION)
        store_tokens(dg_share + here * DIM, rows, valid, tl.trans(-dg_t), DIM)
        dattention = dot(down, tl.trans(dz_q), square, OPERAND, PRECISION)  # -G ∂Z_qᵀ [s, t]
        if scale is not None:
            dp += tl.sum(dattention * attention, axis=0)
        dattention = tl.where(causal, p[None, :] * dattention, 0.0)  # ∂Aᵀ
        dq_t = dot(tl.trans(w), tl.trans(dz_q), wide, OPERAND, PRECISION)
        dq_t = dot(tl.trans(k_t), dattention, dq_t, OPERAND, PRECISION)
        dq_t, _ = by_rows(tl.trans(dq_t), q_t)
        if ln_weight is not None:
            dq_t += do_t
        store_tokens(dq + here * DIM, rows, valid, dq_t, DIM)
        dk_t = dot(tl.trans(q_t), tl.trans(dattention), wide, OPERAND, PRECISION)
        store_tokens(dk_share + here * DIM, rows, valid, tl.trans(dk_t), DIM)

        # W ← W - p_n Kᵀ G, b ← b - p_n Σ G
        b = dot(tl.trans(push), ones, b, OPERAND, PRECISION, SPLIT)
        w = dot(tl.trans(push), k_t, w, OPERAND, PRECISION, SPLIT)

    if end == length:
        store_transposed(w_end + state * DIM * DIM, w, DIM)
    if ln_weight is not None:
        tl.store(dweight + program * DIM + j, tl.sum(dgain, axis=0))
    if scale is not None:
        tl.store(dscale + program * mini_batch_size + place, dp, mask=place < mini_batch_size)


# fmt: off
@triton.jit(do_not_specialize=PLAIN)
def scan_kernel(
    q, k, v, eta, ln_weight, ln_bias, scale, grad_w, grad_b, kept_w,
    dk_share, dg_share, dz_q_in, x_in, norm_in, w_end,
    dk, dv, deta, dw0, db0, dweight, dbias, dscale,
    q_strides, k_strides, v_strides, scale_head,
    length, heads, reverse_heads, mini_batch_size, interval,
    DIM: tl.constexpr, TILE: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    program = tl.program_id(0).to(tl.int64)
    batch, head = program // heads, program % heads
    reverse = head >= heads - reverse_heads
    j = tl.arange(0, DIM)
    place = tl.arange(0, TILE)

    dw = load_transposed(grad_w + program * DIM * DIM, DIM)
    db = tl.broadcast_to(tl.load(grad_b + program * DIM + j)[:, None], [DIM, TILE])  # equal columns
    ones = tl.full([TILE, TILE], 1.0, OPERAND)
    w = load_transposed(w_end + program * DIM * DIM, DIM)
    if ln_weight is not None:
        gain = tl.load(ln_weight + head * DIM + j)[None, :]
        offset = tl.load(ln_bias + head * DIM + j)[None, :]
    # Without a norm the roundings of ∂W and ∂Z add up along the sequence, see the README.
    SPLIT: tl.constexpr = ln_weight is None
    p_full = 1.0
    p_last = 1.0
    if scale is not None:
        scale += head * scale_head
        p_full = tl.load(scale + mini_batch_size - 1)
        p_last = tl.load(scale + (length - 1) % mini_batch_size)
    # One row per token of a tile, added up at the end: a sum over tokens needs all the warps.
    dgain = tl.zeros([TILE, DIM], tl.float32)
    doffset = tl.zeros([TILE, DIM], tl.float32)
    dp = tl.zeros([TILE], tl.float32)

    q += batch * q_strides[0] + head * q_strides[2]
    k += batch * k_strides[0] + head * k_strides[2]
    v += batch * v_strides[0] + head * v_strides[2]
    q_rows = row_offsets(q_strides[1], reverse, TILE)
    k_rows = row_offsets(k_strides[1], reverse, TILE)
    v_rows = row_offsets(v_strides[1], reverse, TILE)
    rows = row_offsets(heads * DIM, reverse, TILE)  # of contiguous [B, T, H, d]
    token = place * tl.where(reverse, -heads, heads)  # of contiguous [B, T, H]

    segment = interval * mini_batch_size
    # Absent tokens of a tile come as zeros, their rate and r too: they add nothing to any sum.
    for done in tl.range(0, tl.cdiv(length, segment), num_stages=1):
        begin = (tl.cdiv(length, segment) - 1 - done) * segment
        end = tl.minimum(begin + segment, length)
        if done > 0:
            # The state after this segment was kept: take it, so that roundings do not add up.
            kept = (begin // segment) * tl.num_programs(0) + program
            w = load_transposed(kept_w + kept * DIM * DIM, DIM)
        batches = tl.cdiv(end - begin, mini_batch_size)
        for behind in tl.range(0, batches, num_stages=1):
            start = begin + (batches - 1 - behind) * mini_batch_size
            last = tl.minimum(mini_batch_size, length - start) - 1
            valid = place <= last
            first = tl.where(reverse, length - 1 - start, start).to(tl.int64)
            here = (batch * length + first) * heads + head
            q_t = load_tokens(q + first * q_strides[1], q_rows, valid, DIM)
            k_t = load_tokens(k + first * k_strides[1], k_rows, valid, DIM)
            v_t = load_tokens(v + first * v_strides[1], v_rows, valid, DIM)
            eta_t = tl.load(eta + here + token, mask=valid, other=0.0)
            dg = load_tokens(dg_share + here * DIM, rows, valid, DIM).to(tl.float32)
            dz_q = load_tokens(dz_q_in + here * DIM, rows, valid, DIM)
            x = load_tokens(x_in + here * DIM, rows, valid, DIM).to(tl.float32)
            dk_t = load_tokens(dk_share + here * DIM, rows, valid, DIM)
            if ln_weight is not None:
                r = tl.load(norm_in + (here + token) * 2, mask=valid, other=0.0)
                mean_ux = tl.load(norm_in + (here + token) * 2 + 1, mask=valid, other=0.0)
            q_t, k_t = by_rows(q_t, k_t)  # as in segments_kernel
            p_n = p_last if start + mini_batch_size > length else p_full

            # M = K ∂W + ∂b, through W ← W - p_n Kᵀ G and b ← b - p_n Σ G
            through_w = dot(dw, tl.trans(k_t), db, OPERAND, PRECISION, SPLIT)
            through_w, k_row = by_rows(tl.trans(through_w), k_t)

            if ln_weight is not None:
                error = x * gain + offset + (k_row.to(tl.float32) - v_t.to(tl.float32))
                u = error * gain
                g = (u - (tl.sum(u, axis=1) / DIM)[:, None] - x * mean_ux[:, None]) * r[:, None]
            else:
                g = x - v_t.to(tl.float32)
            step = g * eta_t[:, None]  # G
            dg -= p_n * through_w
            if scale is not None:
                share = tl.sum(tl.sum(through_w * step, axis=1), axis=0)
                dp -= tl.where(place == last, share, 0.0)

            # Through G = η g(z, k, v)
            deta_t = tl.sum(dg * g, axis=1)
            tl.store(deta + here + token, deta_t, mask=valid)
            a = dg * eta_t[:, None]
            derror = tl.zeros([TILE, DIM], tl.float32)
            dv_t = -a
            dz = a
            if ln_weight is not None:
                du, mean_ax = project(a, x, DIM)
                du *= r[:, None]
                derror = du * gain
                dv_t = -derror
                dx = derror * gain - (a * mean_ux[:, None] + u * mean_ax[:, None]) * r[:, None]
                dz, _ = project(dx, x, DIM)
                dz = (dz - x * (deta_t * eta_t / DIM)[:, None]) * r[:, None]
                dgain += du * error + derror * x
                doffset += derror
            store_tokens(dv + here * DIM, rows, valid, dv_t, DIM)

            # Through Z = K W + b, with W as it was before this mini-batch
            step *= p_n
            if not SPLIT:
                step, dz = step.to(OPERAND), dz.to(OPERAND)
            w = dot(tl.trans(step), k_t, w, OPERAND, PRECISION, SPLIT)
            wide = tl.zeros([DIM, TILE], tl.float32)
            dk_w = dot(tl.trans(dw), tl.trans(step), wide, OPERAND, PRECISION)
            dk_w = dot(tl.trans(w), tl.trans(dz), -dk_w, OPERAND, PRECISION)
            dk_w, dk_t = by_rows(tl.trans(dk_w), dk_t)
            store_tokens(dk + here * DIM, rows, valid, dk_w + dk_t.to(tl.float32) + derror, DIM)
            db = dot(tl.trans(dz_q), ones, db, OPERAND, PRECISION, SPLIT)
            db = dot(tl.trans(dz), ones, db, OPERAND, PRECISION, SPLIT)
            dw = dot(tl.trans(dz_q), q_t, dw, OPERAND, PRECISION, SPLIT)
            dw = dot(tl.trans(dz), k_t, dw, OPERAND, PRECISION, SPLIT)

    store_transposed(dw0 + program * DIM * DIM, dw, DIM)
    tl.store(db0 + program * DIM + j, tl.max(db, axis=1))
    if ln_weight is not None:
        tl.store(dweight + program * DIM + j, tl.sum(dgain, axis=0))
        tl.store(dbias + program * DIM + j, tl.sum(doffset, axis=0))
    if scale is not None:
        tl.store(dscale + program * mini_batch_size + place, dp, mask=place < mini_batch_size)


segments = tuned(segments_kernel)
scan = tuned(scan_kernel, overwrites=("dk", "dv"))
