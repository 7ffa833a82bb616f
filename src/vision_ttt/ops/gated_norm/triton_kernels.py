"""GPU kernels of gated_norm: one program processes a run of tokens, a few at a time.

A tile [n, R, D] holds the directions of n tokens, with n, R and D padded to powers of two. Tiles
without the axis R or n have size 1 there, so that all tiles have one thread layout. Arithmetic is
in float32 for tensors of any dtype.
"""

from __future__ import annotations

import triton
import triton.language as tl

SQRT_HALF: tl.constexpr = tl.constexpr(0.7071067811865476)
INVERSE_SQRT_2_PI: tl.constexpr = tl.constexpr(0.3989422804014327)

PLAIN = ["tokens", "length", "chunk"]
"""Integers that the code is not specialised for, so that new values compile nothing."""


@triton.jit
def _axes(PADDED_PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Numbers of the directions [1, R, 1] and of the channels [1, 1, D]."""
    return tl.arange(0, PADDED_PARTS)[None, :, None], tl.arange(0, BLOCK)[None, None, :]


@triton.jit
def _parameters(
    weight,
    bias,
    PARTS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """γ [1, R, D] and Σ_r β_r [1, 1, D], the only use of β."""
    part, channel = _axes(PADDED_PARTS, BLOCK)
    place, there = part * DIM + channel, (part < PARTS) & (channel < DIM)
    gain = tl.load(weight + place, mask=there, other=0.0).to(tl.float32)
    offset = tl.load(bias + place, mask=there, other=0.0).to(tl.float32)
    return gain, tl.sum(offset, axis=1, keep_dims=True)


@triton.jit
def _rows(strides, token, length):
    """Offsets of the tokens [n, 1, 1], numbered through all images, in a strided [B, T, …]."""
    image = token // length
    position = token - image * length
    return image.to(tl.int64) * strides[0] + position.to(tl.int64) * strides[1]


@triton.jit
def _load(x, rows, columns, mask):
    return tl.load(x + rows + columns, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(x, rows, columns, value, mask):
    tl.store(x + rows + columns, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _standardise(z, there, eps, DIM: tl.constexpr):
    """x̂, which is z with mean 0 and variance 1 along D, and r = 1 / standard deviation [n, R, 1].

    Both are 0 in padding, for any eps.
    """
    mean = tl.sum(z, axis=2, keep_dims=True) / DIM
    centred = tl.where(there, z - mean, 0.0)
    r = tl.rsqrt(tl.sum(centred * centred, axis=2, keep_dims=True) / DIM + eps)
    return tl.where(there, centred * r, 0.0), r


@triton.jit
def _normal_cdf(x):
    """Φ(x), with GELU(x) = x Φ(x)."""
    return 0.5 * (1.0 + tl.erf(x * SQRT_HALF))


# fmt: off
@triton.jit(do_not_specialize=PLAIN)
def forward_kernel(
    z, gate, weight, bias, out, z_strides, gate_strides, tokens, length, chunk, eps,
    PARTS: tl.constexpr, DIM: tl.constexpr,
    TOKENS: tl.constexpr, PADDED_PARTS: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    part, channel = _axes(PADDED_PARTS, BLOCK)
    gain, offset = _parameters(weight, bias, PARTS, DIM, PADDED_PARTS, BLOCK)
    first = tl.program_id(0) * chunk
    for start in tl.range(first, tl.minimum(first + chunk, tokens), TOKENS, num_stages=1):
        token = start + tl.arange(0, TOKENS)[:, None, None]
        valid = (token < tokens) & (channel < DIM)
        there = valid & (part < PARTS)
        z_t = _load(z, _rows(z_strides, token, length), part * DIM + channel, there)
        if gate is not None:
            x = _load(gate, _rows(gate_strides, token, length), channel, valid)
        x_hat, _ = _standardise(z_t, there, eps, DIM)
        total = tl.sum(x_hat * gain, axis=1, keep_dims=True) + offset
        if gate is not None:
            total *= x * _normal_cdf(x)
        _store(out, token.to(tl.int64) * DIM, channel, total, valid)


# fmt: off
@triton.jit(do_not_specialize=PLAIN)
def backward_kernel(
    grad, z, gate, weight, bias, dz, dgate, dweight, dbias,
    grad_strides, z_strides, gate_strides, tokens, length, chunk, eps,
    PARTS: tl.constexpr, DIM: tl.constexpr,
    TOKENS: tl.constexpr, PADDED_PARTS: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    part, channel = _axes(PADDED_PARTS, BLOCK)
    gain, offset = _parameters(weight, bias, PARTS, DIM, PADDED_PARTS, BLOCK)
    gain_share = tl.zeros([TOKENS, PADDED_PARTS, BLOCK], tl.float32)
    offset_share = tl.zeros([TOKENS, 1, BLOCK], tl.float32)
    first = tl.program_id(0) * chunk
    for start in tl.range(first, tl.minimum(first + chunk, tokens), TOKENS, num_stages=1):
        token = start + tl.arange(0, TOKENS)[:, None, None]
        valid = (token < tokens) & (channel < DIM)
        there = valid & (part < PARTS)
        z_t = _load(z, _rows(z_strides, token, length), part * DIM + channel, there)
        g = _load(grad, _rows(grad_strides, token, length), channel, valid)
        if gate is not None:
            x = _load(gate, _rows(gate_strides, token, length), channel, valid)
        x_hat, r = _standardise(z_t, there, eps, DIM)

        if gate is not None:
            cdf = _normal_cdf(x)
            slope = cdf + x * INVERSE_SQRT_2_PI * tl.exp(-0.5 * x * x)
            total = tl.sum(x_hat * gain, axis=1, keep_dims=True) + offset
            _store(dgate, token.to(tl.int64) * DIM, channel, g * total * slope, valid)
            g *= x * cdf

        # ∂z = r P (g γ), with P h = h - mean(h) - x̂ mean(h x̂)
        h = g * gain
        mean = tl.sum(h, axis=2, keep_dims=True) / DIM
        along = tl.sum(h * x_hat, axis=2, keep_dims=True) / DIM
        h = r * (h - mean - x_hat * along)
        _store(dz, token.to(tl.int64) * (PARTS * DIM), part * DIM + channel, h, there)
        gain_share += g * x_hat
        offset_share += g

    program = tl.program_id(0).to(tl.int64)
    gain_share = tl.sum(gain_share, axis=0, keep_dims=True)
    offset_share = tl.sum(offset_share, axis=0, keep_dims=True)
    there = (part < PARTS) & (channel < DIM)
    _store(dweight, program * (PARTS * DIM), part * DIM + channel, gain_share, there)
    _store(dbias, program * DIM, channel, offset_share, channel < DIM)
