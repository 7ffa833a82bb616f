"""What the Triton kernels of ttt_linear share: tiles of tokens, products, the inner norm.

Legend: n tokens of a mini-batch, padded to a tile; d the head dimension. Matrices that meet the
state stand transposed, one token per column: Wᵀ is then the left factor of every product and stays
in its registers from one mini-batch to the next.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(
    a,
    b,
    accumulator,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLIT: tl.constexpr = False,
):
    """accumulator + a b in float32, the factors rounded to OPERAND for the tensor cores.

    With SPLIT what the rounding takes off a is multiplied too, in a product of its own.
    """
    # The interpreter multiplies the integers in which it stores bfloat16: there floats go in.
    FACTOR: tl.constexpr = tl.float32 if INTERPRETED else OPERAND
    rounded = a.to(OPERAND)
    b = b.to(OPERAND).to(FACTOR)
    if SPLIT and a.dtype != OPERAND:
        rest = (a - rounded.to(tl.float32)).to(OPERAND).to(FACTOR)
        accumulator = tl.dot(rest, b, accumulator, input_precision=PRECISION)
    return tl.dot(rounded.to(FACTOR), b, accumulator, input_precision=PRECISION)


@triton.jit
def load_transposed(x, DIM: tl.constexpr):
    """Xᵀ of a contiguous matrix X [d, d]."""
    i = tl.arange(0, DIM)
    return tl.trans(tl.load(x + i[:, None] * DIM + i[None, :]))


@triton.jit
def store_transposed(x, tile, DIM: tl.constexpr):
    """Write tileᵀ to a contiguous matrix [d, d]."""
    i = tl.arange(0, DIM)
    tl.store(x + i[:, None] * DIM + i[None, :], tl.trans(tile))


@triton.jit
def _later(x, beside, next_x, next_beside):
    return next_x, next_beside


@triton.jit
def by_rows(x, beside):
    """X [n, d] itself, spread over the threads as the loaded tile ``beside`` [n, d] is: row by row.

    A product leaves its columns to all warps, and a mean along d would take an exchange between
    them. Here it stays within eight threads. Triton gives both tiles of a scan the layout of memory
    and takes a scan through no other; this one, along the numbers of one thread, changes nothing.
    """
    if INTERPRETED:
        return x, beside
    ROWS: tl.constexpr = x.shape[0]
    DIM: tl.constexpr = x.shape[1]
    VECTOR: tl.constexpr = 128 // beside.dtype.primitive_bitwidth
    x = tl.permute(tl.reshape(x, [ROWS, DIM // VECTOR, VECTOR]), (2, 0, 1))
    beside = tl.permute(tl.reshape(beside, [ROWS, DIM // VECTOR, VECTOR]), (2, 0, 1))
    x, beside = tl.associative_scan((x, beside), 0, _later)
    x = tl.reshape(tl.permute(x, (1, 2, 0)), [ROWS, DIM])
    return x, tl.reshape(tl.permute(beside, (1, 2, 0)), [ROWS, DIM])


@triton.jit
def row_offsets(stride, reverse, TILE: tl.constexpr):
    """Where the tokens [n] of a mini-batch lie from its first one, in elements."""
    return tl.arange(0, TILE) * (tl.where(reverse, -1, 1).to(tl.int64) * stride)


@triton.jit
def load_tokens(x, rows, valid, DIM: tl.constexpr):
    """Tile [n, d] of the token rows at the given offsets [n]; rows that are not valid are 0."""
    return tl.load(x + rows[:, None] + tl.arange(0, DIM)[None, :], mask=valid[:, None], other=0.0)


@triton.jit
def store_tokens(x, rows, valid, tile, DIM: tl.constexpr):
    """Write the valid rows of tile [n, d] to the given offsets [n], rounded to x's dtype."""
    addresses = x + rows[:, None] + tl.arange(0, DIM)[None, :]
    tl.store(addresses, tile.to(x.dtype.element_ty), mask=valid[:, None])


@triton.jit
def standardise(z, valid, eps, DIM: tl.constexpr):
    """x̂ [n, d], z with mean 0 and variance 1 along d, and r = 1 / standard deviation [n].

    Of absent tokens, all of whose z are one number, both are 0, whatever eps is.
    """
    centred = z - (tl.sum(z, axis=1) / DIM)[:, None]
    r = tl.rsqrt(tl.sum(centred * centred, axis=1) / DIM + eps)
    r = tl.where(valid, r, 0.0)
    return centred * r[:, None], r


@triton.jit
def project(x, x_hat, DIM: tl.constexpr):
    """P x = x - mean(x) - x̂ mean(x x̂) along d, and the second mean [n]."""
    mean = tl.sum(x, axis=1) / DIM
    along = tl.sum(x * x_hat, axis=1) / DIM
    return x - mean[:, None] - x_hat * along[:, None], along
