"""The common part of ttt_mlp's Triton kernels: GELU, and blocks of hidden units of a state.

Legend: a block is some of the 4 d hidden units: columns of W1 [d, 4d] and b1, rows of W2 [4d, d].
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _gate(z):
    """s = (1 + tanh u) / 2, u' and z u'' of GELU(z) = z s, with u = √(2/π) (z + 0.044715 z³)."""
    bend = 0.7978845608028654 * 0.044715 * z * z
    s = 1.0 / (1.0 + tl.exp(-2.0 * z * (0.7978845608028654 + bend)))
    return s, 0.7978845608028654 + 3.0 * bend, 6.0 * bend


@triton.jit
def gelu(z):
    """σ(z)."""
    s, _, _ = _gate(z)
    return z * s


@triton.jit
def gelu_slope(z):
    """σ'(z)."""
    s, slope, _ = _gate(z)
    return s + 2.0 * z * s * (1.0 - s) * slope


@triton.jit
def gelu_bend(z):
    """σ''(z)."""
    s, slope, bend = _gate(z)
    return 4.0 * s * (1.0 - s) * (slope + 0.5 * bend - z * (2.0 * s - 1.0) * slope * slope)


@triton.jit
def in_w1(block, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets of a block [d, BLOCK] of W1."""
    j = block * BLOCK + tl.arange(0, BLOCK)
    return tl.arange(0, DIM)[:, None] * (4 * DIM) + j[None, :]


@triton.jit
def in_w2(block, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets of a block [BLOCK, d] of W2."""
    j = block * BLOCK + tl.arange(0, BLOCK)
    return j[:, None] * DIM + tl.arange(0, DIM)[None, :]


@triton.jit
def in_hidden(rows, block, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets of a block [n, BLOCK] of hidden units of the tokens at the rows [n]."""
    return rows[:, None] * (4 * DIM) + block * BLOCK + tl.arange(0, BLOCK)[None, :]


@triton.jit
def copy_state(to_w1, to_b1, to_w2, to_b2, w1, b1, w2, b2, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Copy the state at the pointers w1 … b2."""
    for block in tl.range(0, 4 * DIM // BLOCK, num_stages=1):
        j = block * BLOCK + tl.arange(0, BLOCK)
        of_w1 = in_w1(block, DIM, BLOCK)
        of_w2 = in_w2(block, DIM, BLOCK)
        tl.store(to_w1 + of_w1, tl.load(w1 + of_w1))
        tl.store(to_b1 + j, tl.load(b1 + j))
        tl.store(to_w2 + of_w2, tl.load(w2 + of_w2))
    i = tl.arange(0, DIM)
    tl.store(to_b2 + i, tl.load(b2 + i))


@triton.jit
def rows_of(bias, TILE: tl.constexpr):
    """A bias as equal rows [n, ...]."""
    return tl.broadcast_to(bias[None, :], [TILE, bias.shape[0]])
