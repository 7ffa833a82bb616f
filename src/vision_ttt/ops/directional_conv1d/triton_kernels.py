"""GPU kernels of directional_conv1d: one program computes a tile of tokens × channels.

Every tap loads the tile again, shifted by a token. All loads but the first hit the cache. The
channels of a block have one direction, so that all shift alike and a load moves sixteen bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _place(length, channels, forward_channels, TOKENS: tl.constexpr, CHANNELS: tl.constexpr):
    """A program's row of tiles, image, tokens [n], channels [c], their mask, and the direction."""
    reverse_blocks = tl.cdiv(channels - forward_channels, CHANNELS)
    blocks = reverse_blocks + tl.cdiv(forward_channels, CHANNELS)
    tiles = tl.cdiv(length, TOKENS)
    program = tl.program_id(0)
    row, block = program // blocks, program % blocks
    reverse = block < reverse_blocks
    first = tl.where(reverse, forward_channels, -reverse_blocks * CHANNELS)
    channel = first + block * CHANNELS + tl.arange(0, CHANNELS)
    present = channel < tl.where(reverse, channels, forward_channels)
    token = row % tiles * TOKENS + tl.arange(0, TOKENS)
    return row.to(tl.int64), (row // tiles).to(tl.int64), token, channel, present, reverse


@triton.jit
def _load(x, token_stride, token, length, channel, present):
    """Tile [n, c] of an image in float32; tokens beyond its ends and absent channels are 0."""
    inside = (token >= 0) & (token < length)
    addresses = x + (token.to(tl.int64) * token_stride)[:, None] + channel[None, :]
    return tl.load(addresses, mask=inside[:, None] & present[None, :], other=0.0).to(tl.float32)


@triton.jit
def _store(x, channels, token, length, channel, present, tile):
    """Write tile [n, c] to a contiguous image, rounded to its dtype."""
    addresses = x + (token.to(tl.int64) * channels)[:, None] + channel[None, :]
    mask = (token < length)[:, None] & present[None, :]
    tl.store(addresses, tile.to(x.dtype.element_ty), mask=mask)


# fmt: off
@triton.jit(do_not_specialize=["length"])
def forward_kernel(
    x, weight, bias, y,
    x_batch, x_token, length, channels, forward_channels,
    TAPS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):
    # fmt: on
    _, batch, token, channel, present, reverse = _place(
        length, channels, forward_channels, TOKENS, CHANNELS
    )
    x += batch * x_batch
    y += batch * length * channels
    total = tl.zeros([TOKENS, CHANNELS], tl.float32)
    total += tl.load(bias + channel, mask=present, other=0.0).to(tl.float32)[None, :]
    for j in tl.range(TAPS):
        past = tl.where(reverse, -1, 1) * (TAPS - 1 - j)
        tap = tl.load(weight + channel * TAPS + j, mask=present, other=0.0).to(tl.float32)
        total += _load(x, x_token, token - past, length, channel, present) * tap[None, :]
    _store(y, channels, token, length, channel, present, total)


# fmt: off
@triton.jit(do_not_specialize=["length"])
def backward_kernel(
    grad, x, weight, dx, shares,
    grad_batch, grad_token, x_batch, x_token, length, channels, forward_channels,
    TAPS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):
    """Compute dx, and the tile's shares [K + 1, C] of the gradients of the taps and of the bias.

    ∂x_t = Σ_j weight_j ∂y_s and ∂weight_j = Σ_t x_t ∂y_s, both with s = t + (K-1) - j, or
    t - (K-1) + j in reverse.
    """
    # fmt: on
    row, batch, token, channel, present, reverse = _place(
        length, channels, forward_channels, TOKENS, CHANNELS
    )
    grad += batch * grad_batch
    dx += batch * length * channels
    shares += row * (TAPS + 1) * channels
    own = tl.sum(_load(grad, grad_token, token, length, channel, present), 0)
    tl.store(shares + TAPS * channels + channel, own, mask=present)
    x_tile = _load(x + batch * x_batch, x_token, token, length, channel, present)
    total = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for j in tl.range(TAPS):
        later = tl.where(reverse, -1, 1) * (TAPS - 1 - j)
        tap = tl.load(weight + channel * TAPS + j, mask=present, other=0.0).to(tl.float32)
        grad_tile = _load(grad, grad_token, token + later, length, channel, present)
        total += grad_tile * tap[None, :]
        tl.store(shares + j * channels + channel, tl.sum(grad_tile * x_tile, 0), mask=present)
    _store(dx, channels, token, length, channel, present, total)
