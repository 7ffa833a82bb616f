"""Backward kernel of ttt_mlp for GPUs: the gradient of the state, from the last tile to the first.

One program scans the tokens of one head of one image backwards. The state before a mini-batch is
computed from the one after it; what that takes of every token, Z1 and x̂, the forward kernel has
written in its second run. This folder's README has the derivation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vision_ttt.ops.ttt_linear.triton_tiles import (
    by_rows,
    dot,
    inner_gradient,
    load_affine,
    load_norm,
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
    gelu_bend,
    gelu_slope,
    in_hidden,
    in_w1,
    in_w2,
    rows_of,
)


@triton.jit
def _total(x):
    return tl.sum(tl.sum(x, axis=1), axis=0)


# fmt: off
@triton.jit
def _undo(
    number, count, p_n, db2, w1, b1, w2, b2, dw1, db1, dw2,
    sum_w1, sum_b1, sum_w2, dsum_w1, dsum_b1, dsum_w2,
    k, v, eta, ln_weight, ln_bias, scale, z1_in, x_in, norm_in,
    k_strides, image, heads, head, reverse, length, mini_batch_size, v_strides,
    DIM: tl.constexpr, TILE: tl.constexpr, SEVERAL: tl.constexpr, OPERAND: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
):
    """Write the state before a mini-batch whose last tile is ``number``; return Σ G2, ∂p_n.

    With SEVERAL tiles, also write the sums S after the last one, and ∂S = -p_n ∂W.
    """
    # fmt: on
    i = tl.arange(0, DIM)
    share = 0.0
    sum_b2 = tl.zeros([DIM], tl.float32)
    for block in tl.range(0, 4 * DIM // BLOCK, num_stages=1):
        of_w1 = in_w1(block, DIM, BLOCK)
        of_b1 = block * BLOCK + tl.arange(0, BLOCK)
        of_w2 = in_w2(block, DIM, BLOCK)
        s1 = tl.zeros([DIM, BLOCK], tl.float32)
        sb1 = tl.zeros([BLOCK], tl.float32)
        s2 = tl.zeros([BLOCK, DIM], tl.float32)
        w2_t = tl.load(w2 + of_w2)
        for layer in tl.static_range(1, -1, -1):  # the second layer first, whose W2 leads to G1
            sum_b2 = tl.zeros([DIM], tl.float32)
            for other in tl.range(0, count, num_stages=1):
                _, token, valid, _ = locate(
                    number - other, mini_batch_size, length, reverse, TILE, SEVERAL
                )
                here = (image + token) * heads + head
                k_t = load_tokens(k, token * k_strides[1], valid, DIM)
                v_t = load_tokens(v, token * v_strides[1], valid, DIM)
                eta_t = tl.load(eta + here, mask=valid, other=0.0)
                x = load_tokens(x_in, here * DIM, valid, DIM).to(tl.float32)
                r, mean_ux = load_norm(norm_in, here, valid, NORM)
                gain, offset = load_affine(ln_weight, ln_bias, NORM, DIM)
                g2, _, _ = inner_gradient(x, r, mean_ux, k_t, v_t, gain, offset, NORM, DIM)
                step2 = g2 * eta_t[:, None]
                sum_b2 += tl.sum(step2, axis=0)
                of_z1 = in_hidden(here, block, DIM, BLOCK)
                z1 = tl.load(z1_in + of_z1, mask=valid[:, None], other=0.0).to(tl.float32)
                if layer == 1:
                    x2 = gelu(z1)
                    s2 = product(tl.trans(x2), step2, s2, OPERAND, PARTS, False, not NORM)
                else:
                    step1 = tl.zeros([TILE, BLOCK], tl.float32)
                    step1 = product(
                        step2, tl.trans(w2_t), step1, OPERAND, PARTS, False, not NORM
                    )
                    step1 *= gelu_slope(z1)
                    s1 = product(tl.trans(k_t), step1, s1, OPERAND, PARTS, False, not NORM)
                    sb1 += tl.sum(step1, axis=0)
            if layer == 1:
                w2_t += p_n * s2
        tl.store(w1 + of_w1, tl.load(w1 + of_w1) + p_n * s1)
        tl.store(b1 + of_b1, tl.load(b1 + of_b1) + p_n * sb1)
        tl.store(w2 + of_w2, w2_t)
        if SEVERAL or scale is not None:
            dw1_t = tl.load(dw1 + of_w1)
            db1_t = tl.load(db1 + of_b1)
            dw2_t = tl.load(dw2 + of_w2)
        if SEVERAL:
            tl.store(sum_w1 + of_w1, s1)
            tl.store(sum_b1 + of_b1, sb1)
            tl.store(sum_w2 + of_w2, s2)
            tl.store(dsum_w1 + of_w1, -p_n * dw1_t)
            tl.store(dsum_b1 + of_b1, -p_n * db1_t)
            tl.store(dsum_w2 + of_w2, -p_n * dw2_t)
        if scale is not None:
            share -= _total(dw1_t * s1) + _total(dw2_t * s2) + tl.sum(db1_t * sb1, axis=0)
    tl.store(b2 + i, tl.load(b2 + i) + p_n * sum_b2)
    return sum_b2, share - tl.sum(db2 * sum_b2, axis=0)


# fmt: off
@triton.jit(do_not_specialize=PLAIN)
def scan_kernel(
    q, k, v, eta, ln_weight, ln_bias, scale, grad_o, grad_w1, grad_b1, grad_w2, grad_b2,
    kept_w1, kept_b1, kept_w2, kept_b2, w1, b1, w2, b2, z1_in, x_in, norm_in, z1_q_held, dz1_held,
    sum_w1, sum_b1, sum_w2, dsum_w1, dsum_b1, dsum_w2,
    dq, dk, dv, deta, dw1, db1, dw2, db2_out, dweight, dbias, dscale, dlast,
    q_strides, k_strides, v_strides, grad_strides, scale_head,
    length, heads, reverse_heads, mini_batch_size, interval, eps,
    DIM: tl.constexpr, TILE: tl.constexpr, SEVERAL: tl.constexpr,
    OPERAND: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    HIDDEN: tl.constexpr = 4 * DIM
    BLOCKS: tl.constexpr = HIDDEN // BLOCK
    NORM: tl.constexpr = ln_weight is not None
    # Without a norm the rounding errors of ∂W and ∂Z accumulate along the sequence.
    SPLIT: tl.constexpr = not NORM
    program = tl.program_id(0).to(tl.int64)
    batch, head = program // heads, program % heads
    reverse = head >= heads - reverse_heads
    i = tl.arange(0, DIM)
    place = tl.arange(0, TILE)
    causal = place[:, None] >= place[None, :]  # [t, s]

    w1 += program * DIM * HIDDEN
    b1 += program * HIDDEN
    w2 += program * HIDDEN * DIM
    b2 += program * DIM
    dw1 += program * DIM * HIDDEN
    db1 += program * HIDDEN
    dw2 += program * HIDDEN * DIM
    db2_out += program * DIM
    copy_state(
        dw1, db1, dw2, db2_out, grad_w1 + program * DIM * HIDDEN, grad_b1 + program * HIDDEN,
        grad_w2 + program * HIDDEN * DIM, grad_b2 + program * DIM, DIM, BLOCK,
    )  # fmt: skip
    db2 = tl.load(grad_b2 + program * DIM + i)
    # The sums S of a mini-batch's tiles so far, and ∂S; with one tile these are 0 and -p_n ∂W.
    sum_b2 = tl.zeros([DIM], tl.float32)
    dsum_b2 = tl.zeros([DIM], tl.float32)
    if SEVERAL:
        sum_w1 += program * DIM * HIDDEN
        sum_b1 += program * HIDDEN
        sum_w2 += program * HIDDEN * DIM
        dsum_w1 += program * DIM * HIDDEN
        dsum_b1 += program * HIDDEN
        dsum_w2 += program * HIDDEN * DIM
    if NORM:
        ln_weight += head * DIM
        ln_bias += head * DIM
    p_full = 1.0
    p_last = 1.0
    if scale is not None:
        scale += head * scale_head
        p_full = tl.load(scale + mini_batch_size - 1)
        p_last = tl.load(scale + (length - 1) % mini_batch_size)
        dlast += program * tl.cdiv(length, mini_batch_size)
    dgain = tl.zeros([TILE, DIM], tl.float32)
    doffset = tl.zeros([TILE, DIM], tl.float32)
    q += batch * q_strides[0] + head * q_strides[2]
    k += batch * k_strides[0] + head * k_strides[2]
    v += batch * v_strides[0] + head * v_strides[2]
    grad_o += batch * grad_strides[0] + head * grad_strides[2]
    rows = program * TILE + place  # of the tile's hidden units between two passes

    tiles_of_one = tl.cdiv(mini_batch_size, TILE)
    tiles = tiles_of(length, mini_batch_size, TILE)
    segment = interval * tiles_of_one
    # Absent tokens of a tile are loaded as zeros, as are their rate and r, and add 0 to every sum.
    for behind in tl.range(0, tiles, num_stages=1):
        number = tiles - 1 - behind
        part, token, valid, last = locate(number, mini_batch_size, length, reverse, TILE, SEVERAL)
        here = (batch * length + token) * heads + head  # in contiguous [B, T, H]
        if behind > 0 and (number + 1) % segment == 0:
            # The saved state replaces the computed one, so that rounding errors do not accumulate.
            kept = ((number + 1) // segment - 1) * tl.num_programs(0) + program
            tl.debug_barrier()
            copy_state(
                w1, b1, w2, b2, kept_w1 + kept * DIM * HIDDEN, kept_b1 + kept * HIDDEN,
                kept_w2 + kept * HIDDEN * DIM, kept_b2 + kept * DIM, DIM, BLOCK,
            )  # fmt: skip
        tl.debug_barrier()
        p_n = p_last if number + 1 == tiles else p_full  # of the last tile of a mini-batch
        if last:
            sum_b2, share = _undo(
                number, part // TILE + 1, p_n, db2, w1, b1, w2, b2, dw1, db1, dw2,
                sum_w1, sum_b1, sum_w2, dsum_w1, dsum_b1, dsum_w2,
                k, v, eta, ln_weight, ln_bias, scale, z1_in, x_in, norm_in,
                k_strides, batch * length, heads, head, reverse, length, mini_batch_size, v_strides,
                DIM, TILE, SEVERAL, OPERAND, PARTS, BLOCK, NORM,
            )  # fmt: skip
            dsum_b2 = -p_n * db2
            if scale is not None:
                tl.store(dlast + number // tiles_of_one, share)
            tl.debug_barrier()

        q_t = load_tokens(q, token * q_strides[1], valid, DIM)
        k_t = load_tokens(k, token * k_strides[1], valid, DIM)
        v_t = load_tokens(v, token * v_strides[1], valid, DIM)
        eta_t = tl.load(eta + here, mask=valid, other=0.0)
        x = load_tokens(x_in, here * DIM, valid, DIM).to(tl.float32)
        r, mean_ux = load_norm(norm_in, here, valid, NORM)
        gain, offset = load_affine(ln_weight, ln_bias, NORM, DIM)
        g2, u, error = inner_gradient(x, r, mean_ux, k_t, v_t, gain, offset, NORM, DIM)
        step2 = g2 * eta_t[:, None]
        sum_b2 -= tl.sum(step2, axis=0)
        p = tl.where(valid, 1.0, 0.0)
        if scale is not None:
            p = tl.load(scale + part + place, mask=valid, other=0.0)
        attention = tl.zeros([TILE, TILE], tl.float32)
        attention2 = tl.zeros([TILE, TILE], tl.float32)
        attention = dot(q_t, tl.trans(k_t), attention, OPERAND, PARTS) + 1.0
        attention = tl.where(causal, attention, 0.0)  # A1 [t, s]

        # The test views' way to the output, and M2 = X2 ∂S2 + ∂s2
        z2_q = rows_of(tl.load(b2 + i), TILE)
        moved = rows_of(sum_b2, TILE)
        if not SEVERAL:
            moved = tl.zeros([TILE, DIM], tl.float32)
        dg2 = rows_of(dsum_b2, TILE)
        for block in tl.range(0, BLOCKS, num_stages=1):
            of_w1 = in_w1(block, DIM, BLOCK)
            of_b1 = block * BLOCK + tl.arange(0, BLOCK)
            of_w2 = in_w2(block, DIM, BLOCK)
            of_z1 = in_hidden(here, block, DIM, BLOCK)
            z1 = tl.load(z1_in + of_z1, mask=valid[:, None], other=0.0).to(tl.float32)
            x2 = gelu(z1)
            w2_t = tl.load(w2 + of_w2)
            step1 = tl.zeros([TILE, BLOCK], tl.float32)
            step1 = product(step2, tl.trans(w2_t), step1, OPERAND, PARTS, False, SPLIT)
            step1 *= gelu_slope(z1)
            moved1 = tl.zeros([TILE, BLOCK], tl.float32)
            if SEVERAL:
                # The sums before this tile
                s1 = tl.load(sum_w1 + of_w1)
                s1 = product(tl.trans(k_t), -step1, s1, OPERAND, PARTS, False, SPLIT)
                tl.store(sum_w1 + of_w1, s1)
                sb1 = tl.load(sum_b1 + of_b1) - tl.sum(step1, axis=0)
                tl.store(sum_b1 + of_b1, sb1)
                s2 = tl.load(sum_w2 + of_w2)
                s2 = product(tl.trans(x2), -step2, s2, OPERAND, PARTS, False, SPLIT)
                tl.store(sum_w2 + of_w2, s2)
                moved1 = product(q_t, s1, rows_of(sb1, TILE), OPERAND, PARTS, False, SPLIT)
            moved1 = product(attention, step1, moved1, OPERAND, PARTS, False, SPLIT)  # U1
            z1_q = rows_of(tl.load(b1 + of_b1), TILE)
            z1_q = product(q_t, tl.load(w1 + of_w1), z1_q, OPERAND, PARTS, False, SPLIT)
            z1_q -= p[:, None] * moved1
            tl.store(z1_q_held + in_hidden(rows, block, DIM, BLOCK), z1_q)
            x2_q = gelu(z1_q)
            attention2 = dot(x2_q, tl.trans(x2), attention2, OPERAND, PARTS)
            z2_q = product(x2_q, w2_t, z2_q, OPERAND, PARTS, False, SPLIT)
            if SEVERAL:
                moved = product(x2_q, s2, moved, OPERAND, PARTS, False, SPLIT)
                dsum2 = tl.load(dsum_w2 + of_w2)
            else:
                dsum2 = -p_n * tl.load(dw2 + of_w2)
            dg2 = product(x2, dsum2, dg2, OPERAND, PARTS, False, SPLIT)
        attention2 = tl.where(causal, attention2 + 1.0, 0.0)  # A2 [t, s]
        moved = product(attention2, step2, moved, OPERAND, PARTS, False, SPLIT)  # U2
        z2_q -= p[:, None] * moved

        # Back through f, and through Z2_q = X2_q W2 + b2 - P U2
        z2_q, q_t = by_rows(z2_q, q_t)
        do_t = load_tokens(grad_o, token * grad_strides[1], valid, DIM).to(tl.float32)
        dz2_q = do_t
        if NORM:
            x_q, r_q = standardise(z2_q, valid, eps, DIM)
            dz2_q, _ = project(do_t * gain, x_q, DIM)
            dz2_q *= r_q[:, None]
            dgain += do_t * x_q
            doffset += do_t
        dupdate2 = -p[:, None] * dz2_q  # ∂U2
        dattention = tl.zeros([TILE, TILE], tl.float32)  # ∂A1
        dattention2 = dot(dupdate2, tl.trans(step2), tl.zeros_like(dattention), OPERAND, PARTS)
        dattention2 = tl.where(causal, dattention2, 0.0)
        dg2 = product(tl.trans(attention2), dupdate2, dg2, OPERAND, PARTS, False, SPLIT)
        dp = -tl.sum(dz2_q * moved, axis=1)

        # Through layer 2: ∂X2_q, of which ∂Z1_q takes the place of Z1_q, and ∂X2
        tl.debug_barrier()
        for block in tl.range(0, BLOCKS, num_stages=1):
            of_w2 = in_w2(block, DIM, BLOCK)
            of_z1 = in_hidden(here, block, DIM, BLOCK)
            of_held = in_hidden(rows, block, DIM, BLOCK)
            z1 = tl.load(z1_in + of_z1, mask=valid[:, None], other=0.0).to(tl.float32)
            x2 = gelu(z1)
            z1_q = tl.load(z1_q_held + of_held)
            x2_q = gelu(z1_q)
            wide = tl.zeros([TILE, BLOCK], tl.float32)
            w2_t = tl.load(w2 + of_w2)
            dx2_q = product(dz2_q, tl.trans(w2_t), wide, OPERAND, PARTS, False, SPLIT)
            dx2_q = product(dattention2, x2, dx2_q, OPERAND, PARTS, False, SPLIT)
            dw2_t = tl.load(dw2 + of_w2)
            if SEVERAL:
                s2 = tl.load(sum_w2 + of_w2)
                dx2_q = product(dupdate2, tl.trans(s2), dx2_q, OPERAND, PARTS, False, SPLIT)
                dsum2 = tl.load(dsum_w2 + of_w2)
                moving = product(tl.trans(x2_q), dupdate2, dsum2, OPERAND, PARTS, False, SPLIT)
                tl.store(dsum_w2 + of_w2, moving)
            else:
                dsum2 = -p_n * dw2_t
            dx2 = product(tl.trans(dattention2), x2_q, wide, OPERAND, PARTS, False, SPLIT)
            dx2 = product(step2, tl.trans(dsum2), dx2, OPERAND, PARTS, False, SPLIT)
            dw2_t = product(tl.trans(x2_q), dz2_q, dw2_t, OPERAND, PARTS, False, SPLIT)
            tl.store(dw2 + of_w2, dw2_t)
            tl.store(z1_q_held + of_held, dx2_q * gelu_slope(z1_q))
            tl.store(dz1_held + of_held, dx2 * gelu_slope(z1))

        # Through Z1_q = Q W1 + b1 - P U1 and G1 = η g1, g1 = E1 ⊙ σ'(Z1), E1 = g2 W2ᵀ
        deta_t = tl.sum(dg2 * g2, axis=1)
        dg2 *= eta_t[:, None]
        dq_t = tl.zeros([TILE, DIM], tl.float32)
        dk_t = tl.zeros([TILE, DIM], tl.float32)
        tl.debug_barrier()
        for block in tl.range(0, BLOCKS, num_stages=1):
            of_w1 = in_w1(block, DIM, BLOCK)
            of_b1 = block * BLOCK + tl.arange(0, BLOCK)
            of_w2 = in_w2(block, DIM, BLOCK)
            of_z1 = in_hidden(here, block, DIM, BLOCK)
            of_held = in_hidden(rows, block, DIM, BLOCK)
            z1 = tl.load(z1_in + of_z1, mask=valid[:, None], other=0.0).to(tl.float32)
            slope = gelu_slope(z1)
            wide = tl.zeros([TILE, BLOCK], tl.float32)
            w2_t = tl.load(w2 + of_w2)
            e1 = product(g2, tl.trans(w2_t), wide, OPERAND, PARTS, False, SPLIT)
            g1 = e1 * slope
            step1 = g1 * eta_t[:, None]
            dz1_q = tl.load(z1_q_held + of_held)
            dupdate = -p[:, None] * dz1_q  # ∂U1
            dattention = dot(dupdate, tl.trans(step1), dattention, OPERAND, PARTS)
            w1_t = tl.load(w1 + of_w1)
            dq_t = product(dz1_q, tl.trans(w1_t), dq_t, OPERAND, PARTS, False, SPLIT)
            dw1_t = tl.load(dw1 + of_w1)
            db1_t = tl.load(db1 + of_b1)
            moved1 = wide
            if SEVERAL:
                s1 = tl.load(sum_w1 + of_w1)
                if scale is not None:
                    moved1 = rows_of(tl.load(sum_b1 + of_b1), TILE)
                    moved1 = product(q_t, s1, moved1, OPERAND, PARTS, False, SPLIT)
                dq_t = product(dupdate, tl.trans(s1), dq_t, OPERAND, PARTS, False, SPLIT)
                dsum1 = tl.load(dsum_w1 + of_w1)
                dsum_b1_t = tl.load(dsum_b1 + of_b1)
                moving = product(tl.trans(q_t), dupdate, dsum1, OPERAND, PARTS, False, SPLIT)
                tl.store(dsum_w1 + of_w1, moving)
                tl.store(dsum_b1 + of_b1, dsum_b1_t + tl.sum(dupdate, axis=0))
            else:
                dsum1 = -p_n * dw1_t
                dsum_b1_t = -p_n * db1_t
            if scale is not None:
                moved1 = product(attention, step1, moved1, OPERAND, PARTS, False, SPLIT)
                dp -= tl.sum(dz1_q * moved1, axis=1)
            dk_t = product(step1, tl.trans(dsum1), dk_t, OPERAND, PARTS, False, SPLIT)
            dg1 = rows_of(dsum_b1_t, TILE)
            dg1 = product(k_t, dsum1, dg1, OPERAND, PARTS, False, SPLIT)  # M1
            dg1 = product(tl.trans(attention), dupdate, dg1, OPERAND, PARTS, False, SPLIT)
            dw1_t = product(tl.trans(q_t), dz1_q, dw1_t, OPERAND, PARTS, False, SPLIT)
            tl.store(dw1 + of_w1, dw1_t)
            tl.store(db1 + of_b1, db1_t + tl.sum(dz1_q, axis=0))

            deta_t += tl.sum(dg1 * g1, axis=1)
            dg1 *= eta_t[:, None]
            de1 = dg1 * slope
            dg2 = product(de1, w2_t, dg2, OPERAND, PARTS, False, SPLIT)
            dw2_t = tl.load(dw2 + of_w2)
            dw2_t = product(tl.trans(de1), g2, dw2_t, OPERAND, PARTS, False, SPLIT)
            tl.store(dw2 + of_w2, dw2_t)
            dz1 = tl.load(dz1_held + of_held) + dg1 * e1 * gelu_bend(z1)
            tl.store(dz1_held + of_held, dz1)
        dattention = tl.where(causal, dattention, 0.0)
        dq_t = product(dattention, k_t, dq_t, OPERAND, PARTS, False, SPLIT)
        dk_t = product(tl.trans(dattention), q_t, dk_t, OPERAND, PARTS, False, SPLIT)
        if NORM:
            dq_t += do_t
        store_tokens(dq, here * DIM, valid, dq_t, DIM)
        tl.store(deta + here, deta_t, mask=valid)
        if scale is not None:
            tl.store(dscale + here, dp, mask=valid)

        # Through g2 = g(Z2, k, v), Z2 = X2 W2 + b2, X2 = σ(Z1), Z1 = K W1 + b1
        dg2, k_t = by_rows(dg2, k_t)
        dv_t = -dg2
        dz2 = dg2
        if NORM:
            du, mean_ax = project(dg2, x, DIM)
            du *= r[:, None]
            derror = du * gain
            dv_t = -derror
            dk_t += derror
            dx = derror * gain - (dg2 * mean_ux[:, None] + u * mean_ax[:, None]) * r[:, None]
            dz2, _ = project(dx, x, DIM)
            dz2 = (dz2 - x * (tl.sum(dg2 * g2, axis=1) / DIM)[:, None]) * r[:, None]
            dgain += du * error + derror * x
            doffset += derror
        store_tokens(dv, here * DIM, valid, dv_t, DIM)
        tl.debug_barrier()
        for block in tl.range(0, BLOCKS, num_stages=1):
            of_w1 = in_w1(block, DIM, BLOCK)
            of_b1 = block * BLOCK + tl.arange(0, BLOCK)
            of_w2 = in_w2(block, DIM, BLOCK)
            of_z1 = in_hidden(here, block, DIM, BLOCK)
            z1 = tl.load(z1_in + of_z1, mask=valid[:, None], other=0.0).to(tl.float32)
            dz1 = tl.zeros([TILE, BLOCK], tl.float32)
            w2_t = tl.load(w2 + of_w2)
            dz1 = product(dz2, tl.trans(w2_t), dz1, OPERAND, PARTS, False, SPLIT) * gelu_slope(z1)
            dz1 += tl.load(dz1_held + in_hidden(rows, block, DIM, BLOCK))
            dw2_t = tl.load(dw2 + of_w2)
            dw2_t = product(tl.trans(gelu(z1)), dz2, dw2_t, OPERAND, PARTS, False, SPLIT)
            tl.store(dw2 + of_w2, dw2_t)
            w1_t = tl.load(w1 + of_w1)
            dk_t = product(dz1, tl.trans(w1_t), dk_t, OPERAND, PARTS, False, SPLIT)
            dw1_t = tl.load(dw1 + of_w1)
            dw1_t = product(tl.trans(k_t), dz1, dw1_t, OPERAND, PARTS, False, SPLIT)
            tl.store(dw1 + of_w1, dw1_t)
            tl.store(db1 + of_b1, tl.load(db1 + of_b1) + tl.sum(dz1, axis=0))
        store_tokens(dk, here * DIM, valid, dk_t, DIM)
        db2 += tl.sum(dz2_q + dz2, axis=0)
        dsum_b2 += tl.sum(dupdate2, axis=0)

    tl.store(db2_out + i, db2)
    if NORM:
        tl.store(dweight + program * DIM + i, tl.sum(dgain, axis=0))
        tl.store(dbias + program * DIM + i, tl.sum(doffset, axis=0))
