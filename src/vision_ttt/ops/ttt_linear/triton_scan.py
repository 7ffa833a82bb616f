"""Second backward kernel of ttt_linear for GPUs: the gradient of the state.

The gradient runs from the last mini-batch to the first, so one program scans the tokens of one head
of one image backwards. The first kernel, triton_segments.py, computes everything that does not
depend on it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vision_ttt.ops.ttt_linear.triton_tiles import (
    by_rows,
    inner_gradient,
    load_affine,
    load_bias,
    load_norm,
    load_state,
    load_tokens,
    locate,
    product,
    project,
    store_bias,
    store_state,
    store_tokens,
    tiles_of,
    turned,
)
from vision_ttt.ops.ttt_linear.triton_tuning import PLAIN, Tuned


# fmt: off
@triton.jit
def _undo(
    w, number, count, p_n, dw, db,
    k, v, eta, ln_weight, ln_bias, scale, x_in, norm_in,
    k_strides, v_strides, image, heads, head,
    reverse, length, mini_batch_size,
    DIM: tl.constexpr, TILE: tl.constexpr, OPERAND: tl.constexpr, PARTS: tl.constexpr,
    NORM: tl.constexpr,
):
    # fmt: on
    """W before the steps of a mini-batch whose last tile is ``number``, and Σ (K ∂W + ∂b)·G."""
    share = 0.0
    for other in tl.range(0, count, num_stages=1):
        _, token, valid, _ = locate(number - other, mini_batch_size, length, reverse, TILE, True)
        here = (image + token) * heads + head
        k_t = load_tokens(k, token * k_strides[1], valid, DIM)
        v_t = load_tokens(v, token * v_strides[1], valid, DIM)
        eta_t = tl.load(eta + here, mask=valid, other=0.0)
        x = load_tokens(x_in, here * DIM, valid, DIM).to(tl.float32)
        r, mean_ux = load_norm(norm_in, here, valid, NORM)
        gain, offset = load_affine(ln_weight, ln_bias, NORM, DIM)
        g, _, _ = inner_gradient(x, r, mean_ux, k_t, v_t, gain, offset, NORM, DIM)
        step = g * eta_t[:, None]
        if scale is not None:
            m = product(k_t, dw, db, OPERAND, PARTS, False, not NORM)
            m, _ = by_rows(m, k_t)
            share += tl.sum(tl.sum(m * step, axis=1), axis=0)
        step *= p_n
        w = product(tl.trans(k_t), step, w, OPERAND, PARTS, False, not NORM)
    return w, share


# fmt: off
@triton.jit(do_not_specialize=PLAIN)
def scan_kernel(
    q, k, v, eta, ln_weight, ln_bias, scale, grad_w, grad_b, kept_w,
    dk_share, dg_share, dz_q_in, x_in, norm_in, w_end,
    dk, dv, deta, dw0, db0, dweight, dbias, dlast,
    q_strides, k_strides, v_strides, scale_head,
    length, heads, reverse_heads, mini_batch_size, interval,
    DIM: tl.constexpr, TILE: tl.constexpr, SEVERAL: tl.constexpr,
    OPERAND: tl.constexpr, PARTS: tl.constexpr, TRANSPOSED: tl.constexpr,
):
    # fmt: on
    program = tl.program_id(0).to(tl.int64)
    batch, head = program // heads, program % heads
    reverse = head >= heads - reverse_heads
    j = tl.arange(0, DIM)
    place = tl.arange(0, TILE)

    dw = load_state(grad_w + program * DIM * DIM, DIM, TRANSPOSED)
    db = load_bias(grad_b + program * DIM, DIM, TILE, TRANSPOSED)
    dw0 += program * DIM * DIM
    # With several tiles per mini-batch, dw and db are the gradients of the state before the
    # mini-batch, dw_now and db_now those of the earlier tiles' updates, see the forward kernel.
    PART_SCALED: tl.constexpr = SEVERAL and scale is not None
    dw_now, db_now = dw, db
    w = load_state(w_end + program * DIM * DIM, DIM, TRANSPOSED)
    if SEVERAL:  # W uses the memory of ∂W₀
        store_state(dw0, w, DIM, TRANSPOSED)
        tl.debug_barrier()
    # A cast, because Triton 3.8 interprets no constants in bfloat16.
    ones = tl.full([TILE, TILE], 1.0, tl.float32).to(OPERAND)
    NORM: tl.constexpr = ln_weight is not None
    if NORM:
        ln_weight += head * DIM
        ln_bias += head * DIM
    # Without a norm the rounding errors of ∂W and ∂Z accumulate along the sequence, see the README.
    SPLIT: tl.constexpr = not NORM
    p_full = 1.0
    p_last = 1.0
    if scale is not None:
        scale += head * scale_head
        p_full = tl.load(scale + mini_batch_size - 1)
        p_last = tl.load(scale + (length - 1) % mini_batch_size)
        dlast += program * tl.cdiv(length, mini_batch_size)
    # One row per token of a tile, summed at the end, because a sum over tokens involves all warps.
    dgain = tl.zeros([TILE, DIM], tl.float32)
    doffset = tl.zeros([TILE, DIM], tl.float32)

    q += batch * q_strides[0] + head * q_strides[2]
    k += batch * k_strides[0] + head * k_strides[2]
    v += batch * v_strides[0] + head * v_strides[2]

    # Exact products need the registers: tiles that are used late are then loaded late.
    LATE: tl.constexpr = PARTS == 2 or not NORM
    tiles = tiles_of(length, mini_batch_size, TILE)
    segment = interval * tl.cdiv(mini_batch_size, TILE)
    # Absent tokens of a tile are loaded as zeros, as are their rate and r, and add 0 to every sum.
    for done in tl.range(0, tl.cdiv(tiles, segment), num_stages=1):
        begin = (tl.cdiv(tiles, segment) - 1 - done) * segment
        end = tl.minimum(begin + segment, tiles)
        if done > 0:
            # The saved state after this segment replaces W, so that rounding errors do not
            # accumulate.
            kept = (begin // segment) * tl.num_programs(0) + program
            w = load_state(kept_w + kept * DIM * DIM, DIM, TRANSPOSED)
            if SEVERAL:
                tl.debug_barrier()
                store_state(dw0, w, DIM, TRANSPOSED)
                tl.debug_barrier()
        for behind in tl.range(0, end - begin, num_stages=1):
            number = end - 1 - behind
            part, token, valid, last = locate(
                number, mini_batch_size, length, reverse, TILE, SEVERAL
            )
            here = (batch * length + token) * heads + head  # in contiguous [B, T, H]
            if SEVERAL:
                if last:
                    p_n = p_last if number + 1 == tiles else p_full
                    w = load_state(dw0, DIM, TRANSPOSED)
                    w, share = _undo(
                        w, number, part // TILE + 1, p_n, dw, db,
                        k, v, eta, ln_weight, ln_bias, scale, x_in, norm_in,
                        k_strides, v_strides, batch * length, heads, head,
                        reverse, length, mini_batch_size,
                        DIM, TILE, OPERAND, PARTS, NORM,
                    )
                    tl.debug_barrier()
                    store_state(dw0, w, DIM, TRANSPOSED)
                    tl.debug_barrier()
                    if PART_SCALED:
                        tl.store(dlast + number // tl.cdiv(mini_batch_size, TILE), -share)
                        dw_now, db_now = dw * p_n, db * p_n
                    else:
                        dw_now, db_now = dw, db
                        dw, db = tl.zeros_like(dw), tl.zeros_like(db)
                p_n = 1.0
            else:
                p_n = p_last if (number + 1) * mini_batch_size > length else p_full
                dw_now, db_now = dw, db

            k_t = load_tokens(k, token * k_strides[1], valid, DIM)
            v_t = load_tokens(v, token * v_strides[1], valid, DIM)
            eta_t = tl.load(eta + here, mask=valid, other=0.0)
            dg = load_tokens(dg_share, here * DIM, valid, DIM).to(tl.float32)
            x = load_tokens(x_in, here * DIM, valid, DIM).to(tl.float32)
            r, mean_ux = load_norm(norm_in, here, valid, NORM)
            if LATE:
                v_t, k_t = by_rows(v_t, k_t)  # as in segments_kernel
            else:
                dz_q = load_tokens(dz_q_in, here * DIM, valid, DIM)
                dk_t = load_tokens(dk_share, here * DIM, valid, DIM)
                q_t = load_tokens(q, token * q_strides[1], valid, DIM)
                q_t, k_t = by_rows(q_t, k_t)

            # M = K ∂W + ∂b, through W ← W - p_n Kᵀ G and b ← b - p_n Σ G
            dw_t = turned(dw_now, TRANSPOSED)
            m = product(k_t, dw_t, db_now, OPERAND, PARTS, TRANSPOSED, SPLIT)
            m, k_row = by_rows(turned(m, TRANSPOSED), k_t)

            gain, offset = load_affine(ln_weight, ln_bias, NORM, DIM)
            g, u, error = inner_gradient(x, r, mean_ux, k_row, v_t, gain, offset, NORM, DIM)
            step = g * eta_t[:, None]  # G
            dg -= p_n * m
            if scale is not None and not SEVERAL:
                tl.store(dlast + number, -tl.sum(tl.sum(m * step, axis=1), axis=0))

            # Back over this step to W, and the step's share of ∂K
            step *= p_n
            if not SPLIT:
                step = step.to(OPERAND)
            if not SEVERAL:
                w = product(tl.trans(k_t), step, w, OPERAND, PARTS, TRANSPOSED, SPLIT)
            wide = turned(tl.zeros([TILE, DIM], tl.float32), TRANSPOSED)
            dk_w = product(step, tl.trans(dw_t), wide, OPERAND, PARTS, TRANSPOSED)

            # Through G = η g(z, k, v)
            deta_t = tl.sum(dg * g, axis=1)
            tl.store(deta + here, deta_t, mask=valid)
            a = dg * eta_t[:, None]
            derror = tl.zeros([TILE, DIM], tl.float32)
            dv_t = -a
            dz = a
            if NORM:
                du, mean_ax = project(a, x, DIM)
                du *= r[:, None]
                derror = du * gain
                dv_t = -derror
                dx = derror * gain - (a * mean_ux[:, None] + u * mean_ax[:, None]) * r[:, None]
                dz, _ = project(dx, x, DIM)
                dz = (dz - x * (deta_t * eta_t / DIM)[:, None]) * r[:, None]
                dgain += du * error + derror * x
                doffset += derror
            store_tokens(dv, here * DIM, valid, dv_t, DIM)

            # Through Z = K W + b, with W as it was before this mini-batch
            if LATE:
                dk_t = load_tokens(dk_share, here * DIM, valid, DIM)
            if not SPLIT:
                dz = dz.to(OPERAND)
            w_t = turned(load_state(dw0, DIM, TRANSPOSED) if SEVERAL else w, TRANSPOSED)
            dk_w = product(dz, tl.trans(w_t), -dk_w, OPERAND, PARTS, TRANSPOSED)
            dk_w, dk_t = by_rows(turned(dk_w, TRANSPOSED), dk_t)
            store_tokens(dk, here * DIM, valid, dk_w + dk_t.to(tl.float32) + derror, DIM)

            # ∂W ← ∂W + Qᵀ ∂Z_q + Kᵀ ∂Z, ∂b ← ∂b + Σ (∂Z_q + ∂Z)
            if LATE:
                dz_q = load_tokens(dz_q_in, here * DIM, valid, DIM)
                q_t = load_tokens(q, token * q_strides[1], valid, DIM)
            if SEVERAL:
                scaled = dz_q
                if PART_SCALED:
                    p = tl.load(scale + part + place, mask=valid, other=0.0)
                    scaled = dz_q.to(tl.float32) * p[:, None]
                db_now = product(ones, scaled, db_now, OPERAND, PARTS, TRANSPOSED, SPLIT)
                dw_now = product(tl.trans(q_t), scaled, dw_now, OPERAND, PARTS, TRANSPOSED, SPLIT)
            if PART_SCALED or not SEVERAL:
                db = product(ones, dz_q, db, OPERAND, PARTS, TRANSPOSED, SPLIT)
                dw = product(tl.trans(q_t), dz_q, dw, OPERAND, PARTS, TRANSPOSED, SPLIT)
            db = product(ones, dz, db, OPERAND, PARTS, TRANSPOSED, SPLIT)
            dw = product(tl.trans(k_t), dz, dw, OPERAND, PARTS, TRANSPOSED, SPLIT)
            if SEVERAL and not PART_SCALED and part == 0:
                dw += dw_now
                db += db_now

    if SEVERAL:
        tl.debug_barrier()
    store_state(dw0, dw, DIM, TRANSPOSED)
    store_bias(db0 + program * DIM, db, DIM, TRANSPOSED)
    if NORM:
        tl.store(dweight + program * DIM + j, tl.sum(dgain, axis=0))
        tl.store(dbias + program * DIM + j, tl.sum(doffset, axis=0))


scan = Tuned(scan_kernel, overwrites=("dk", "dv"))
