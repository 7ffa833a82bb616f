"""Segments of the sequence side by side, where blocks of channels are too few to fill a GPU.

:func:`shares_kernel` computes what a segment adds to the state, from zero, and the sum of its δ;
:func:`carry_kernel` from those the states between segments: s ← exp(A Σ δ) s + share. Then every
segment has a program of its own. The gradient of the state goes the other way likewise.
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


# fmt: off
@triton.jit(do_not_specialize=PLAIN)
def shares_kernel(
    x, delta, rows, a, z, bias, shares, sums,
    x_strides, delta_strides, row_strides, z_strides,
    length, channels, forward_channels, groups, segment,
    N: tl.constexpr, STATES: tl.constexpr, CHANNELS: tl.constexpr,
    SOFTPLUS: tl.constexpr, BACKWARD: tl.constexpr,
):
    """Compute h ← exp(δ A) h + δ u B of a segment from zero, and Σ δ.

    Here x is u and ``rows`` B. BACKWARD: g ← exp(δ A) (g + C ∂y), from the last token to the
    first, where x is the gradient of y, gated by z, and ``rows`` C.
    """
    # fmt: on
    # As axes of the grid they are the same for all threads, and take none of their registers.
    image, images, part = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.program_id(2)
    channel, present, group, reverse = locate(channels, forward_channels, groups, CHANNELS)
    a2 = load_state(a, 0, channels, channel, present, N, STATES) * LOG2_E
    offset = load_parameter(bias, channel, present)
    h = tl.zeros([CHANNELS, STATES], tl.float32)
    total = tl.zeros([CHANNELS], tl.float32)
    x += image * x_strides[0]
    delta += image * delta_strides[0]
    if z is not None:
        z += image * z_strides[0]
    rows += image * row_strides[0] + group * row_strides[2]

    begin = part * segment
    end = tl.minimum(begin + segment, length)
    # One token ahead, as in the forward kernel.
    descending = reverse != BACKWARD
    token = tl.where(reverse, length - 1 - begin, begin)
    if BACKWARD:
        token = tl.where(reverse, length - end, end - 1)
    at = token.to(tl.int64)
    x_next = load_channels(x, at * x_strides[1], channel, present)
    delta_next = load_channels(delta, at * delta_strides[1], channel, present)
    row_next = load_row(rows, at * row_strides[1], N, STATES)
    z_next = x_next
    if z is not None:
        z_next = load_channels(z, at * z_strides[1], channel, present)
    for _ in tl.range(begin, end):
        x_t, step, row, z_t = x_next, delta_next, row_next, z_next
        token += tl.where(descending, -1, 1)
        at = tl.maximum(tl.minimum(token, length - 1), 0).to(tl.int64)
        x_next = load_channels(x, at * x_strides[1], channel, present)
        delta_next = load_channels(delta, at * delta_strides[1], channel, present)
        row_next = load_row(rows, at * row_strides[1], N, STATES)
        if z is not None:
            z_next = load_channels(z, at * z_strides[1], channel, present)

        step += offset
        if SOFTPLUS:
            step = softplus(step)
        total += step
        decay = tl.exp2(step[:, None] * a2)
        if BACKWARD:
            if z is not None:
                x_t *= z_t * sigmoid(z_t)
            h = decay * (h + x_t[:, None] * row[None, :])
        else:
            h = decay * h + (step * x_t)[:, None] * row[None, :]
    place = part * images + image
    store_state(shares, place, channels, channel, present, h, N, STATES)
    store_channels(sums, place * channels, channel, present, total)


@triton.jit
def _after(decay, share, later_decay, later_share):
    """Two segments as one."""
    return decay * later_decay, later_decay * share + later_share


@triton.jit(do_not_specialize=["size", "states", "segments"])
def carry_kernel(
    shares, sums, a, first, starts, size, states, segments,
    N: tl.constexpr, BLOCK: tl.constexpr, SEGMENTS: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Compute the states before every segment, ``starts`` [S, …], from ``first`` [B, D, N] or 0.

    A program computes numbers of the state side by side, of which there are ``size`` = D N per
    image and ``states`` = B D N altogether. BACKWARD: the gradients behind every segment, from that
    behind the last one.
    """
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    present = e < states
    a2 = tl.load(a + e % size, mask=present, other=0.0) * LOG2_E
    state = tl.zeros([BLOCK], tl.float32)
    if first is not None:
        state = tl.load(first + e, mask=present, other=0.0)
    place = tl.arange(0, SEGMENTS)
    for done in tl.range(0, segments, SEGMENTS):
        number = done + place  # of a segment in the order of the carry
        # Shifted by one, because a state is that before its segment.
        before = number - 1
        if BACKWARD:
            number, before = segments - 1 - number, segments - number
        inside = (place > 0)[:, None] | (done > 0)
        valid = (done + place < segments)[:, None] & present[None, :]
        before = before.to(tl.int64)[:, None] * states + e[None, :]
        total = tl.load(sums + before // N, mask=valid & inside, other=0.0)
        share = tl.load(shares + before, mask=valid & inside, other=0.0)
        decay, share = tl.associative_scan((tl.exp2(total * a2[None, :]), share), 0, _after)
        after = decay * state[None, :] + share
        tl.store(starts + number.to(tl.int64)[:, None] * states + e[None, :], after, mask=valid)
        state = tl.sum(tl.where((place == SEGMENTS - 1)[:, None], after, 0.0), 0)
