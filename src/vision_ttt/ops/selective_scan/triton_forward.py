"""Forward kernel of selective_scan for GPUs: a program scans a segment of a block of channels."""

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


# fmt: off
@triton.jit(do_not_specialize=PLAIN)
def forward_kernel(
    u, delta, a, b, c, skip, z, bias, starts, y, last, kept,
    u_strides, delta_strides, z_strides, b_strides, c_strides,
    length, channels, forward_channels, groups, segment,
    N: tl.constexpr, STATES: tl.constexpr, CHANNELS: tl.constexpr, CHUNK: tl.constexpr,
    SOFTPLUS: tl.constexpr,
):
    # fmt: on
    # As axes of the grid they are the same for all threads, and take none of their registers.
    image, images, part = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.program_id(2)
    channel, present, group, reverse = locate(channels, forward_channels, groups, CHANNELS)
    a2 = load_state(a, 0, channels, channel, present, N, STATES) * LOG2_E
    d = load_parameter(skip, channel, present)
    offset = load_parameter(bias, channel, present)
    h = tl.zeros([CHANNELS, STATES], tl.float32)
    if starts is not None:
        h = load_state(starts, part * images + image, channels, channel, present, N, STATES)
    u += image * u_strides[0]
    delta += image * delta_strides[0]
    if z is not None:
        z += image * z_strides[0]
    b += image * b_strides[0] + group * b_strides[2]
    c += image * c_strides[0] + group * c_strides[2]
    y += image * length * channels

    begin = part * segment
    end = tl.minimum(begin + segment, length)
    # A token's arithmetic is too short to hide its loads: load one token ahead.
    token = tl.where(reverse, length - 1 - begin, begin).to(tl.int64)
    u_next = load_channels(u, token * u_strides[1], channel, present)
    x_next = load_channels(delta, token * delta_strides[1], channel, present)
    b_next = load_row(b, token * b_strides[1], N, STATES)
    c_next = load_row(c, token * c_strides[1], N, STATES)
    z_next = u_next
    if z is not None:
        z_next = load_channels(z, token * z_strides[1], channel, present)
    for first in tl.range(begin, end, CHUNK):
        if kept is not None:
            row = (first // CHUNK) * images + image
            store_state(kept, row, channels, channel, present, h, N, STATES)
        for step in tl.range(first, tl.minimum(first + CHUNK, end)):
            u_t, x, b_t, c_t, z_t = u_next, x_next, b_next, c_next, z_next
            now = tl.where(reverse, length - 1 - step, step).to(tl.int64)
            later = tl.minimum(step + 1, length - 1)
            token = tl.where(reverse, length - 1 - later, later).to(tl.int64)
            u_next = load_channels(u, token * u_strides[1], channel, present)
            x_next = load_channels(delta, token * delta_strides[1], channel, present)
            b_next = load_row(b, token * b_strides[1], N, STATES)
            c_next = load_row(c, token * c_strides[1], N, STATES)
            if z is not None:
                z_next = load_channels(z, token * z_strides[1], channel, present)

            x += offset
            if SOFTPLUS:
                x = softplus(x)
            h = tl.exp2(x[:, None] * a2) * h + (x * u_t)[:, None] * b_t[None, :]
            y_t = tl.sum(h * c_t[None, :], 1) + d * u_t
            if z is not None:
                y_t *= z_t * sigmoid(z_t)
            store_channels(y, now * channels, channel, present, y_t)
    if end == length:
        store_state(last, image, channels, channel, present, h, N, STATES)
