"""What the GPU kernels of selective_scan share: a program's place, and the parts of one token.

A program scans a block of channels, whose state is a tile [c, n]. Triton lays such a tile out by
its loads: a lane holds four neighbouring n of several channels, and sums along either axis cross
few lanes.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
PLAIN = ["length", "forward_channels", "segment"]
"""Integers that the code is not specialised for, so that new values compile nothing."""


@triton.jit
def locate(channels, forward_channels, groups, CHANNELS: tl.constexpr):
    """A program's channels [c], their mask, their group of B and C, and their direction.

    Blocks of channels are numbered along the grid's second axis. The channels of a block have one
    direction and one group.
    """
    block = tl.program_id(1)
    if groups == 1:
        forward_blocks = tl.cdiv(forward_channels, CHANNELS)
        reverse = block >= forward_blocks
        first = tl.where(reverse, forward_channels - forward_blocks * CHANNELS, 0)
        first += block * CHANNELS
        stop = tl.where(reverse, channels, forward_channels)
        group = block * 0
    else:
        of_group = channels // groups
        group = block // tl.cdiv(of_group, CHANNELS)
        stop = (group + 1) * of_group
        reverse = stop > forward_channels
        first = group * of_group + block % tl.cdiv(of_group, CHANNELS) * CHANNELS
    channel = first + tl.arange(0, CHANNELS)
    return channel, channel < stop, group, reverse


@triton.jit
def load_state(x, row, channels, channel, present, N: tl.constexpr, STATES: tl.constexpr):
    """Tile [c, n] of row [D, N] of x [rows, D, N] in float32; 0 where there is none."""
    n = tl.arange(0, STATES)[None, :]
    x += tl.cast(row, tl.int64) * channels * N
    mask = present[:, None] & (n < N)
    return tl.load(x + (channel[:, None] * N + n), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_state(x, row, channels, channel, present, tile, N: tl.constexpr, STATES: tl.constexpr):
    """Write the tile to row [D, N] of x [rows, D, N]."""
    n = tl.arange(0, STATES)[None, :]
    x += tl.cast(row, tl.int64) * channels * N
    tl.store(x + (channel[:, None] * N + n), tile, mask=present[:, None] & (n < N))


@triton.jit
def load_parameter(x, channel, present):
    """Channels [c] of a parameter [D] in float32, or 0 where x is None."""
    if x is None:
        values = tl.zeros(channel.shape, tl.float32)
    else:
        values = tl.load(x + channel, mask=present, other=0.0).to(tl.float32)
    return values


@triton.jit
def load_channels(x, token, channel, present):
    """Channels [c] of a token, which begins at an offset from x, in float32."""
    return tl.load(x + (token + channel), mask=present, other=0.0).to(tl.float32)


@triton.jit
def store_channels(x, token, channel, present, values):
    """Write channels [c] of a token, rounded to x's dtype."""
    tl.store(x + (token + channel), values.to(x.dtype.element_ty), mask=present)


@triton.jit
def load_row(x, token, N: tl.constexpr, STATES: tl.constexpr):
    """B or C [n] of a token, which begins at an offset from x, in float32; 0 beyond N."""
    n = tl.arange(0, STATES)
    return tl.load(x + (token + n), mask=n < N, other=0.0).to(tl.float32)


@triton.jit
def softplus(x):
    """ln(1 + e^x), with all its digits where it is small.

    ln(1 + e) = 2 artanh(s) with s = e / (2 + e), for e = e^-|x|, hence s ≤ 1/3: eight terms of the
    series. The rounded sum 1 + e has lost what a small e is.
    """
    e = tl.exp2(-tl.abs(x) * LOG2_E)
    s = e / (2.0 + e)
    q = s * s
    series = 1.0 / 13 + q * (1.0 / 15)
    series = 1.0 / 11 + q * series
    series = 1.0 / 9 + q * series
    series = 1.0 / 7 + q * series
    series = 1.0 / 5 + q * series
    series = 1.0 / 3 + q * series
    return tl.maximum(x, 0.0) + 2.0 * s * (1.0 + q * series)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(-x * LOG2_E))
