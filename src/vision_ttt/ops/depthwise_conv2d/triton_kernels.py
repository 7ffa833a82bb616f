"""GPU kernels of depthwise_conv2d: one program computes a patch of the grid for some channels.

Every tap loads the patch again, shifted by its place in the window. All loads but the first hit the
cache.
"""

from __future__ import annotations

import triton
import triton.language as tl


# fmt: off
@triton.jit
def _place(
    height, width, channels, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr
):
    """This program's patch, image, rows [n] and columns [n] of its tokens, channels [c]."""
    # fmt: on
    blocks = tl.cdiv(channels, CHANNELS)
    across = tl.cdiv(width, COLUMNS)
    patches = tl.cdiv(height, ROWS) * across
    program = tl.program_id(0)
    patch, block = program // blocks, program % blocks
    within = patch % patches
    token = tl.arange(0, ROWS * COLUMNS)
    row = within // across * ROWS + token // COLUMNS
    column = within % across * COLUMNS + token % COLUMNS
    channel = block * CHANNELS + tl.arange(0, CHANNELS)
    return patch.to(tl.int64), (patch // patches).to(tl.int64), row, column, channel


@triton.jit
def _load(x, token_stride, row, column, height, width, channel, channels):
    """Tile [n, c] of an image in float32; tokens beyond its edges are 0."""
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    token = (row * width + column).to(tl.int64)
    addresses = x + (token * token_stride)[:, None] + channel[None, :]
    mask = inside[:, None] & (channel < channels)[None, :]
    return tl.load(addresses, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(x, row, column, height, width, channel, channels, tile):
    """Write tile [n, c] to a contiguous image, rounded to its dtype."""
    token = (row * width + column).to(tl.int64)
    addresses = x + (token * channels)[:, None] + channel[None, :]
    mask = ((row < height) & (column < width))[:, None] & (channel < channels)[None, :]
    tl.store(addresses, tile.to(x.dtype.element_ty), mask=mask)


# fmt: off
@triton.jit(do_not_specialize=["height", "width"])
def forward_kernel(
    x, weight, y,
    x_batch, x_token, height, width, channels,
    KERNEL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
):
    # fmt: on
    _, batch, row, column, channel = _place(height, width, channels, ROWS, COLUMNS, CHANNELS)
    x += batch * x_batch
    y += batch * height * width * channels
    weight += channel * KERNEL * KERNEL
    total = tl.zeros([ROWS * COLUMNS, CHANNELS], tl.float32)
    for i in tl.range(KERNEL):  # not unrolled: more programs fit a multiprocessor
        down = row + i - KERNEL // 2
        for j in tl.range(KERNEL):
            right = column + (j - KERNEL // 2)
            tap = tl.load(weight + i * KERNEL + j, mask=channel < channels, other=0.0)
            x_tile = _load(x, x_token, down, right, height, width, channel, channels)
            total += x_tile * tap.to(tl.float32)[None, :]
    _store(y, row, column, height, width, channel, channels, total)


# fmt: off
@triton.jit(do_not_specialize=["height", "width"])
def backward_kernel(
    grad, x, weight, dx, shares,
    grad_batch, grad_token, x_batch, x_token, height, width, channels,
    KERNEL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
):
    """Compute dx, and the patch's share [K · K, C] of the weight's gradient.

    ∂x[r, s] = Σ weight[i, j] g and ∂weight[i, j] = Σ x[r, s] g, both with
    g = ∂y[r - i + K//2, s - j + K//2].
    """
    # fmt: on
    patch, batch, row, column, channel = _place(height, width, channels, ROWS, COLUMNS, CHANNELS)
    grad += batch * grad_batch
    x += batch * x_batch
    dx += batch * height * width * channels
    weight += channel * KERNEL * KERNEL
    shares += patch * KERNEL * KERNEL * channels + channel
    x_tile = _load(x, x_token, row, column, height, width, channel, channels)
    total = tl.zeros([ROWS * COLUMNS, CHANNELS], tl.float32)
    for i in tl.range(KERNEL):
        up = row - i + KERNEL // 2
        for j in tl.range(KERNEL):
            left = column - (j - KERNEL // 2)
            tap = tl.load(weight + i * KERNEL + j, mask=channel < channels, other=0.0)
            grad_tile = _load(grad, grad_token, up, left, height, width, channel, channels)
            total += grad_tile * tap.to(tl.float32)[None, :]
            share = tl.sum(grad_tile * x_tile, 0)
            tl.store(shares + (i * KERNEL + j) * channels, share, mask=channel < channels)
    _store(dx, row, column, height, width, channel, channels, total)
