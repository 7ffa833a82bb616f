"""Backward kernel of selective_scan for GPUs: the equations are in dual.py.

A program goes through the chunks of its segment from the last to the first. From a chunk's saved
state it computes the states before each TILE tokens and writes them to memory; then, tile by tile
from the last to the first, the tile's states, which stay in registers, and the gradients.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vision_ttt.ops.selective_scan.triton_parts import (
    LOG2_E,
    PLAIN,
    load_channels,
    load_parameter,
    load_row,
    load_state,
    locate,
    sigmoid,
    softplus,
    store_channels,
    store_state,
)


@triton.jit
def _locate_token(step, end, length, reverse):
    """The step's token, and whether there is one: beyond the last one, that one again."""
    last = tl.minimum(step, end - 1)
    return tl.where(reverse, length - 1 - last, last).to(tl.int64), step < end


@triton.jit
def _advance(
    h, a2, offset, u, delta, b, token, valid, u_token, delta_token, b_token, channel, present,
    N: tl.constexpr, STATES: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """The state after a token, from that before it; the same where the token is not valid."""
    x = load_channels(delta, token * delta_token, channel, present) + offset
    if SOFTPLUS:
        x = softplus(x)
    x = tl.where(valid, x, 0.0)
    u_t = load_channels(u, token * u_token, channel, present)
    b_t = load_row(b, token * b_token, N, STATES)
    return tl.exp2(x[:, None] * a2) * h + (x * u_t)[:, None] * b_t[None, :]


# fmt: off
@triton.jit(do_not_specialize=PLAIN)
def backward_kernel(
    grad, ends, u, delta, a, b, c, skip, z, bias, kept, scratch,
    du, ddelta, dz, db, dc, da, dskip, dbias, dstate,
    grad_strides, u_strides, delta_strides, z_strides, b_strides, c_strides,
    length, channels, forward_channels, groups, segment,
    N: tl.constexpr, STATES: tl.constexpr, CHANNELS: tl.constexpr, CHUNK: tl.constexpr,
    TILE: tl.constexpr, SOFTPLUS: tl.constexpr,
):
    # fmt: on
    # As axes of the grid they are the same for all threads, and take none of their registers.
    image, images, part = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.program_id(2)
    channel, present, group, reverse = locate(channels, forward_channels, groups, CHANNELS)
    place = part * images + image
    a2 = load_state(a, 0, channels, channel, present, N, STATES) * LOG2_E
    d = load_parameter(skip, channel, present)
    offset = load_parameter(bias, channel, present)
    g = load_state(ends, place, channels, channel, present, N, STATES)
    da_sum = tl.zeros([CHANNELS, STATES], tl.float32)
    dskip_sum = tl.zeros([CHANNELS], tl.float32)
    dbias_sum = tl.zeros([CHANNELS], tl.float32)
    grad += image * grad_strides[0]
    u += image * u_strides[0]
    delta += image * delta_strides[0]
    b += image * b_strides[0] + group * b_strides[2]
    c += image * c_strides[0] + group * c_strides[2]
    du += image * length * channels
    ddelta += image * length * channels
    if z is not None:
        z += image * z_strides[0]
        dz += image * length * channels
    n = tl.arange(0, STATES)
    shares = (tl.program_id(1) * images + image) * length * N
    TILES: tl.constexpr = CHUNK // TILE
    scratch += (place * tl.num_programs(1) + tl.program_id(1)) * (TILES * CHANNELS * N)
    lane = tl.arange(0, CHANNELS)
    everywhere = lane < CHANNELS

    begin = part * segment
    end = tl.minimum(begin + segment, length)
    chunks = tl.cdiv(end - begin, CHUNK)
    for number in tl.range(0, chunks):
        first = begin + (chunks - 1 - number) * CHUNK
        tiles = tl.cdiv(tl.minimum(end - first, CHUNK), TILE)
        row = (first // CHUNK) * images + image
        h = load_state(kept, row, channels, channel, present, N, STATES)
        tl.debug_barrier()  # the tiles' states of the chunk before are in use no more
        for tile in tl.range(0, tiles):
            store_state(scratch, tile, CHANNELS, lane, everywhere, h, N, STATES)
            for j in tl.static_range(TILE):
                token, valid = _locate_token(first + tile * TILE + j, end, length, reverse)
                h = _advance(
                    *(h, a2, offset, u, delta, b, token, valid),
                    *(u_strides[1], delta_strides[1], b_strides[1], channel, present),
                    *(N, STATES, SOFTPLUS),
                )
        tl.debug_barrier()

        for back in tl.range(0, tiles):
            tile = tiles - 1 - back
            h = load_state(scratch, tile, CHANNELS, lane, everywhere, N, STATES)
            states = (h,)
            for j in tl.static_range(TILE):
                token, valid = _locate_token(first + tile * TILE + j, end, length, reverse)
                h = _advance(
                    *(h, a2, offset, u, delta, b, token, valid),
                    *(u_strides[1], delta_strides[1], b_strides[1], channel, present),
                    *(N, STATES, SOFTPLUS),
                )
                states = states + (h,)  # noqa: RUF005  (Triton has no starred tuples)
            for j in tl.static_range(TILE - 1, -1, -1):
                token, valid = _locate_token(first + tile * TILE + j, end, length, reverse)
                # The tokens' instructions stay apart: mixed, they would need too many registers.
                tl.debug_barrier()
                inside = tl.where(valid, present, False)
                raw = load_channels(delta, token * delta_strides[1], channel, present) + offset
                x = softplus(raw) if SOFTPLUS else raw
                x = tl.where(valid, x, 0.0)
                u_t = load_channels(u, token * u_strides[1], channel, present)
                b_t = load_row(b, token * b_strides[1], N, STATES)
                c_t = load_row(c, token * c_strides[1], N, STATES)
                dy = load_channels(grad, token * grad_strides[1], channel, inside)
                h = states[j + 1]
                if z is not None:
                    z_t = load_channels(z, token * z_strides[1], channel, present)
                    s = sigmoid(z_t)
                    y = tl.sum(h * c_t[None, :], 1) + d * u_t
                    dz_t = dy * y * s * (1.0 + z_t * (1.0 - s))
                    store_channels(dz, token * channels, channel, inside, dz_t)
                    dy *= z_t * s
                dskip_sum += dy * u_t
                dc_t = tl.sum(h * dy[:, None], 0)
                tl.store(dc + (shares + token * N + n), dc_t, mask=n < tl.where(valid, N, 0))
                g += dy[:, None] * c_t[None, :]
                update = tl.sum(g * b_t[None, :], 1)  # of δ u
                db_t = tl.sum(g * (x * u_t)[:, None], 0)
                tl.store(db + (shares + token * N + n), db_t, mask=n < tl.where(valid, N, 0))
                g *= tl.exp2(x[:, None] * a2)
                r = g * states[j]
                da_sum += r * x[:, None]
                dx = tl.sum(r * a2, 1) * (1.0 / LOG2_E) + update * u_t
                if SOFTPLUS:
                    dx *= sigmoid(raw)
                dx = tl.where(valid, dx, 0.0)
                dbias_sum += dx
                store_channels(ddelta, token * channels, channel, inside, dx)
                store_channels(du, token * channels, channel, inside, update * x + d * dy)

    store_state(da, place, channels, channel, present, da_sum, N, STATES)
    if skip is not None:
        store_channels(dskip, place * channels, channel, present, dskip_sum)
    if bias is not None:
        store_channels(dbias, place * channels, channel, present, dbias_sum)
    if part == 0:
        store_state(dstate, image, channels, channel, present, g, N, STATES)
